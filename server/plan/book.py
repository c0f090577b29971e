"""The groups that are open: which of their rollouts wait, play, or are done, and which are played again.

In: opened groups and ended rollouts. Out: assignments for environment workers, and the groups that became complete. State is in memory;
the turn log is what survives. Nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.server.store.types import SessionOutcome


@dataclass(slots=True)
class RolloutSlot:
    """One of a group's k rollouts."""

    index: int
    attempt: int = 0
    retries_left: int = 0
    outcome: SessionOutcome | None = None
    started_at: float | None = None
    """time.monotonic() when a worker took it; None while it waits."""


@dataclass(slots=True)
class OpenGroup:
    """One group from its opening to its last rollout's end."""

    group_id: str
    task: Any
    """Index in the environment's own tasks, or the task itself as a mapping."""
    seed: int
    slots: list[RolloutSlot]
    task_id: str = ""
    outside: bool = False
    """Opened by somebody else than the plan: nothing of it is handed out, and it counts for no schedule."""
    opened_at: float = field(default_factory=time.monotonic)

    @property
    def complete(self) -> bool:
        """Every rollout has ended for good."""
        return all(slot.outcome is not None for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is told to play: some rollouts of one group, all at the same attempt."""

    group_id: str
    group_size: int
    indices: tuple[int, ...]
    attempt: int
    task: Any
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """For the wire."""
        return {name: getattr(self, name) for name in self.__slots__}


class GroupBook:
    """All open groups, and the queue of what workers should take next."""

    def __init__(self, retries: int) -> None:
        self.retries = retries
        self.groups: dict[str, OpenGroup] = {}
        self._queue: deque[Assignment] = deque()

    def open(self, group_id: str, task: Any, seed: int, size: int, attempt: int = 0) -> OpenGroup:
        """A new group, all of its rollouts queued."""
        slots = [RolloutSlot(i, attempt, self.retries) for i in range(size)]
        group = self.groups[group_id] = OpenGroup(group_id, task, seed, slots)
        self._queue.append(Assignment(group_id, size, tuple(range(size)), attempt, task, seed))
        return group

    def adopt(self, group_id: str, task: Any, size: int) -> OpenGroup:
        """A group that others play, known from now on."""
        slots = [RolloutSlot(i) for i in range(size)]
        return self.groups.setdefault(group_id, OpenGroup(group_id, task, 0, slots, outside=True))

    def take(self) -> Assignment | None:
        """The next assignment, oldest first; None where nothing waits."""
        if not self._queue:
            return None
        assignment = self._queue.popleft()
        for index in assignment.indices:
            self.groups[assignment.group_id].slots[index].started_at = time.monotonic()
        return assignment

    @property
    def waiting(self) -> int:
        """Assignments that no worker took yet."""
        return len(self._queue)

    def ended(self, group_id: str, index: int, attempt: int, outcome: SessionOutcome) -> OpenGroup | None:
        """A rollout ended: an infrastructure fault is played again while retries are left. Returns the group once it is complete; ends of
        attempts that are no longer current change nothing."""
        group = self.groups.get(group_id)
        if group is None or not 0 <= index < len(group.slots):
            return None
        slot = group.slots[index]
        if slot.attempt != attempt or slot.outcome is not None:
            return None
        if outcome.reward is None and slot.retries_left > 0:
            slot.retries_left -= 1
            slot.attempt += 1
            slot.started_at = None
            self._queue.append(Assignment(group_id, len(group.slots), (index,), slot.attempt, group.task, group.seed))
            return None
        slot.outcome = outcome
        return group if group.complete else None

    def overdue(self, seconds: float) -> list[tuple[str, int, int]]:
        """(group, index, attempt) of rollouts that have been playing for longer than `seconds`."""
        now = time.monotonic()
        return [
            (group.group_id, slot.index, slot.attempt)
            for group in self.groups.values()
            for slot in group.slots
            if slot.outcome is None and slot.started_at is not None and now - slot.started_at > seconds
        ]

    def close(self, group_id: str) -> None:
        """Forgets a group that is finished with."""
        self.groups.pop(group_id, None)

    def oldest_running(self) -> Mapping[str, Any] | None:
        """The rollout that has been playing longest, for status lines."""
        playing = [
            (slot.started_at, group.group_id, slot.index)
            for group in self.groups.values()
            for slot in group.slots
            if slot.outcome is None and slot.started_at is not None
        ]
        if not playing:
            return None
        started, group_id, index = min(playing)
        return {"rollout_id": f"{group_id}-{index}", "seconds": time.monotonic() - started}

    def running(self) -> int:
        """Rollouts that workers are playing."""
        return sum(
            slot.outcome is None and slot.started_at is not None
            for group in self.groups.values()
            for slot in group.slots
        )
