"""The groups that are open: which of their rollouts wait, play, or are done, and which are played again.

In: opened groups and ended rollouts. Out: assignments for environment workers, and the groups that became complete. State is in memory;
the turn log is what survives. Nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from palestra.server.plan.types import Assignment, OpenGroup, RolloutSlot
from palestra.server.store.types import SessionOutcome

NO_FAULT = frozenset({"replay_diverged", "abandoned"})
"""Ends of rollouts that could not be led through what was recorded of them: they are played anew, whatever was played again before."""


class GroupBook:
    """All open groups, and the queue of what workers should take next."""

    def __init__(self, retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.retries, self._clock = retries, clock
        self.groups: dict[str, OpenGroup] = {}
        self._queue: deque[Assignment] = deque()

    def open(self, group_id: str, task: Any, seed: int, size: int, attempt: int = 0) -> OpenGroup:
        """A new group, all of its rollouts queued."""
        slots = [RolloutSlot(i, attempt, self.retries) for i in range(size)]
        group = self.groups[group_id] = OpenGroup(group_id, task, seed, slots, opened_at=self._clock())
        self._queue.append(Assignment(group_id, size, tuple(range(size)), attempt, task, seed))
        return group

    def adopt(self, group_id: str, task: Any, size: int) -> OpenGroup:
        """A group that others play, known from now on."""
        slots = [RolloutSlot(i) for i in range(size)]
        opened = OpenGroup(group_id, task, 0, slots, outside=True, opened_at=self._clock())
        return self.groups.setdefault(group_id, opened)

    def reopen(self, group: OpenGroup, again: Sequence[int], replay: Sequence[int]) -> None:
        """A group as it stood before a restart: the rollouts `again` wait to be played anew, those of `replay` to be led through what is on
        record of them. Rollouts of one attempt go to a worker together."""
        self.groups[group.group_id] = group
        for indices, replays in ((replay, True), (again, False)):
            attempts = sorted({group.slots[index].attempt for index in indices})
            for attempt in attempts:
                which = tuple(index for index in indices if group.slots[index].attempt == attempt)
                self._queue.append(
                    Assignment(group.group_id, len(group.slots), which, attempt, group.task, group.seed, replays)
                )

    def take(self) -> Assignment | None:
        """The next assignment, oldest first; None where nothing waits."""
        while self._queue:
            assignment = self._queue.popleft()
            slots = self.groups[assignment.group_id].slots
            waiting = tuple(index for index in assignment.indices if slots[index].outcome is None)
            for index in waiting:
                slots[index].started_at = self._clock()
            if waiting:
                return replace(assignment, indices=waiting)
        return None

    def hand_out_again(self, group_id: str, index: int) -> bool:
        """A rollout whose worker is gone is to be led through what is on record of it by another one. False: it was played again often
        enough."""
        group = self.groups[group_id]
        slot = group.slots[index]
        if slot.retries_left < 1:
            return False
        slot.retries_left -= 1
        slot.started_at = None
        size = len(group.slots)
        self._queue.append(Assignment(group_id, size, (index,), slot.attempt, group.task, group.seed, replay=True))
        return True

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
        free = outcome.stop_reason in NO_FAULT
        if outcome.reward is None and (free or slot.retries_left > 0) and group.verdict is None:
            slot.retries_left -= not free
            slot.attempt += 1
            slot.started_at = None
            self._queue.append(Assignment(group_id, len(group.slots), (index,), slot.attempt, group.task, group.seed))
            return None
        slot.outcome = outcome
        return group if group.complete else None

    def overdue(self, seconds: float) -> list[tuple[str, int, int]]:
        """(group, index, attempt) of rollouts that have been playing for longer than `seconds`."""
        now = self._clock()
        return [
            (group.group_id, slot.index, slot.attempt)
            for group in self.groups.values()
            for slot in group.slots
            if slot.outcome is None and slot.started_at is not None and now - slot.started_at > seconds
        ]

    def close(self, group_id: str) -> None:
        """Forgets a group that is finished with."""
        self.groups.pop(group_id, None)
        if any(waiting.group_id == group_id for waiting in self._queue):
            self._queue = deque(waiting for waiting in self._queue if waiting.group_id != group_id)

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
        return {"rollout_id": f"{group_id}-{index}", "seconds": self._clock() - started}

    def ages(self) -> list[float]:
        """Seconds since each of the plan's own groups was opened."""
        now = self._clock()
        return [now - group.opened_at for group in self.groups.values() if not group.outside]

    def unfinished(self) -> int:
        """Rollouts of the plan's own groups that play or wait to be played."""
        return sum(slot.outcome is None for group in self.groups.values() if not group.outside for slot in group.slots)

    def running(self) -> int:
        """Rollouts that workers are playing."""
        return sum(
            slot.outcome is None and slot.started_at is not None
            for group in self.groups.values()
            for slot in group.slots
        )
