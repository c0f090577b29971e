"""The plan of a run: opens groups as the schedule allows, gathers their rollouts, and hands complete groups to the buffer.

In: workers that ask for work, sessions that end, commits and publishes of the trainer. Out: assignments, and groups in the buffer, or
dropped with a reason that is counted. It waits for the store only. What survives a crash is in the turn log and the buffer; `recover`
rebuilds the rest from them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.envs.types import StopReason
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.plan.admission import Load, capacity
from palestra.server.plan.book import Assignment, GroupBook, OpenGroup, RolloutSlot
from palestra.server.plan.metrics import RolloutMetrics
from palestra.server.plan.order import TaskOrder
from palestra.server.rows import group_of
from palestra.server.signal import Signal
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import GroupRecord, SessionOutcome, SessionRecord, SessionState, StoredSession
from palestra.server.types import GroupState, SessionError, TrajectoryGroup

PLANNED = re.compile(r"g\d{6,}")
"""Names of the plan's own groups."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What of the run's configuration the plan follows."""

    groups_per_step: int
    group_size: int
    staleness: int
    """Train steps."""
    last_step: int
    drop_zero_variance: bool
    retries: int
    seed: int
    shuffle: bool
    rollout_deadline_s: float
    """A rollout that no worker has ended this long after it was handed out is lost: its worker is gone."""


class Plan:
    """One run's source of work."""

    def __init__(self, settings: PlanSettings, log: TurnLog, buffer: EmbeddedBuffer, signal: Signal) -> None:
        self.settings, self.log, self.buffer, self.signal = settings, log, buffer, signal
        self.book = GroupBook(settings.retries)
        self.metrics = RolloutMetrics()
        self.tasks: Sequence[Mapping[str, Any]] | None = None
        """The tasks themselves where a file gave them; None: workers know their tasks by index."""
        self.order: TaskOrder | None = None
        self.committed_step = 0
        self.published_step: int | None = None
        """Train step whose weights the engines have; None before this process saw a publish: nothing is opened until then."""
        self._draws = 0

    def set_source(self, count: int, tasks: Sequence[Mapping[str, Any]] | None = None) -> None:
        """How many tasks there are, and the tasks where the service holds them.

        Raises:
            ValueError: none, or another number than another worker reported.
        """
        if self.order is not None and self.order.count != count:
            raise ValueError(
                f"a worker reports {count} tasks, another reported {self.order.count}: environments differ"
            )
        self.order = TaskOrder(count, shuffle=self.settings.shuffle, seed=self.settings.seed)
        self.tasks = tasks if tasks is not None else self.tasks

    async def recover(self) -> None:
        """After a restart: complete groups are handed on, the others are played again from the start, their sessions discarded."""
        groups = self.log.reader.read_groups()
        planned = [int(g.group_id[1:]) for g in groups if PLANNED.fullmatch(g.group_id)]
        self._draws = 1 + max(planned, default=-1)
        for record in groups:
            if record.state is not GroupState.OPEN:
                continue
            sessions = self.log.reader.read_sessions(group_id=record.group_id)
            if any(session.record.meta.get("external") for session in sessions):
                group = self._readopt(record, sessions)
                if group.complete:
                    await self._finish(group)
                continue
            final = _final_outcomes(sessions, record.size)
            if final is None:
                await self._replay(record, sessions)
                continue
            slots = [RolloutSlot(i, attempt, 0, outcome) for i, (attempt, outcome) in enumerate(final)]
            await self._finish(OpenGroup(record.group_id, record.task, record.seed, slots, sessions[0].record.task_id))

    async def _replay(self, record: GroupRecord, sessions: Sequence[StoredSession]) -> None:
        for session in sessions:
            if session.state is not SessionState.DISCARDED:
                await self.log.discard_session(session.record.rollout_id, session.record.attempt, "restart")
        attempt = 1 + max((s.record.attempt for s in sessions), default=record.attempt)
        await self.log.update_group(record.group_id, attempt=attempt)
        self.book.open(record.group_id, record.task, record.seed, record.size, attempt)

    def is_planned(self, group_id: str) -> bool:
        """Whether the plan itself opened this group."""
        group = self.book.groups.get(group_id)
        return group is not None and not group.outside

    async def adopt(self, group_id: str, size: int, index: int | None, attempt: int, task: Any) -> int:
        """A place for a session in an outside group, which is handed on once all of its sessions have ended. Returns the session's index.

        Raises:
            SessionError: 400 for a size that is none or another one than before; 409 where the group is complete, or the index taken.
        """
        if not 1 <= size <= 4096:
            raise SessionError(f"group_size is {size}, it must be 1 to 4096")
        group = self.book.groups.get(group_id)
        if group is None:
            if self.log.reader.read_groups(group_id=group_id):
                raise SessionError(f"group {group_id} is complete", 409, "group_complete")
            group = self.book.adopt(group_id, task, size)
        if len(group.slots) != size:
            raise SessionError(f"group {group_id} has {len(group.slots)} rollouts, not {size}")
        free = [s.index for s in group.slots if s.started_at is None or (s.outcome is None and s.attempt < attempt)]
        if index is not None and not 0 <= index < size:
            raise SessionError(f"index {index} is not within a group of {size}")
        if not free or (index is not None and index not in free):
            raise SessionError(f"group {group_id} has this session, or all of its {size}", 409, "group_complete")
        slot = group.slots[free[0] if index is None else index]
        slot.started_at, slot.attempt = time.monotonic(), attempt
        await self.log.put_group(GroupRecord(group_id, task, 0, size))
        return slot.index

    def vacate(self, group_id: str, index: int) -> None:
        """The session for which a place was taken was never opened."""
        if (group := self.book.groups.get(group_id)) is not None:
            group.slots[index].started_at = None

    def _readopt(self, record: GroupRecord, sessions: Sequence[StoredSession]) -> OpenGroup:
        """An outside group as it stood before a restart: its sessions go on."""
        group = self.book.adopt(record.group_id, record.task, record.size)
        for session in sessions:
            slot = group.slots[session.record.index]
            slot.started_at, slot.attempt = time.monotonic(), session.record.attempt
            if session.state is not SessionState.OPEN:
                slot.outcome = session.outcome or SessionOutcome(None, stop_reason=session.discard_reason or "")
            group.task_id = session.record.task_id
        return group

    def load(self) -> Load:
        """Groups that are not finished with."""
        counts = self.buffer.counts()
        return Load(
            sum(not group.outside for group in self.book.groups.values()),
            counts.get("ready", 0),
            counts.get("claimed", 0),
        )

    def room(self) -> int:
        """Groups that may be opened now."""
        if self.order is None or self.published_step is None:
            return 0
        return capacity(
            self.load(),
            groups_per_step=self.settings.groups_per_step,
            staleness=self.settings.staleness,
            committed_step=self.committed_step,
            published_step=self.published_step,
            last_step=self.settings.last_step,
        )

    async def take(self) -> Assignment | None:
        """The next assignment for a worker; None where the schedule allows none now."""
        if self.published_step is None:
            return None
        if (waiting := self.book.take()) is not None:
            return waiting
        if self.room() < 1 or self.order is None:
            return None
        draw, self._draws = self._draws, self._draws + 1
        index = self.order.index(draw)
        task: Any = dict(self.tasks[index]) if self.tasks is not None else index
        seed = int(np.random.SeedSequence([self.settings.seed, draw]).generate_state(1)[0]) & 0x7FFFFFFF
        group_id = f"g{draw:06d}"
        self.book.open(group_id, task, seed, self.settings.group_size)
        assignment = self.book.take()
        await self.log.put_group(GroupRecord(group_id, task, seed, self.settings.group_size))
        return assignment

    async def expire(self) -> list[tuple[str, int]]:
        """Gives up rollouts whose worker never came back: a fault, played again while retries are left. Returns (rollout id, attempt)."""
        # Outside sessions have deadlines of their own.
        lost = [entry for entry in self.book.overdue(self.settings.rollout_deadline_s) if self.is_planned(entry[0])]
        for group_id, index, attempt in lost:
            error = f"no worker ended it within {self.settings.rollout_deadline_s:.0f} s"
            record = SessionRecord(f"{group_id}-{index}", attempt, group_id, self.book.groups[group_id].task_id, index)
            await self.ended(record, SessionOutcome(None, stop_reason=StopReason.INFRA, error=error))
        return [(f"{group_id}-{index}", attempt) for group_id, index, attempt in lost]

    async def ended(self, record: SessionRecord, outcome: SessionOutcome) -> None:
        """A session of a group was closed."""
        group = self.book.ended(record.group_id, record.index, record.attempt, outcome)
        if group is not None:
            group.task_id = record.task_id
            await self._finish(group)
        self.signal.notify()

    async def _finish(self, group: OpenGroup) -> None:
        """A complete group: rows, filter, buffer."""
        names = await asyncio.to_thread(self._rollout_names, group)
        trajectories = [
            await asyncio.to_thread(self.log.reader.read_trajectory, names[slot.index], slot.attempt)
            for slot in group.slots
            if slot.outcome is not None and slot.outcome.reward is not None
        ]
        complete = group_of(group.group_id, group.task_id, len(group.slots), trajectories)
        reason = self._drop_reason(complete)
        if reason is None:
            await asyncio.to_thread(self.buffer.put, [complete])
        else:
            await asyncio.to_thread(self.buffer.put_dropped, complete, reason)
        state = GroupState.READY if reason is None else GroupState.DROPPED
        await self.log.update_group(group.group_id, state=state)
        self.metrics.add_group([slot.outcome for slot in group.slots if slot.outcome is not None], reason)
        self.book.close(group.group_id)
        self.signal.notify()

    def _rollout_names(self, group: OpenGroup) -> dict[int, str]:
        """Index -> rollout id: the plan's own follow from the group's, others are as their opener said."""
        if not group.outside:
            return {slot.index: f"{group.group_id}-{slot.index}" for slot in group.slots}
        sessions = self.log.reader.read_sessions(group_id=group.group_id)
        return {session.record.index: session.record.rollout_id for session in sessions}

    def _drop_reason(self, group: TrajectoryGroup) -> str | None:
        if not group.samples:
            return "infra"
        if not self.settings.drop_zero_variance:
            return None
        if len(group.rewards) < 2:
            return "infra"
        values = list(group.rewards.values())
        return "zero_variance" if max(values) - min(values) < 1e-9 else None


def _final_outcomes(sessions: Sequence[StoredSession], size: int) -> list[tuple[int, SessionOutcome]] | None:
    """Per rollout its last attempt and outcome, where every rollout has a closed one with a reward; else None."""
    best: dict[int, tuple[int, SessionOutcome]] = {}
    for session in sessions:
        if session.state is SessionState.CLOSED and session.outcome is not None and session.outcome.reward is not None:
            best[session.record.index] = (session.record.attempt, session.outcome)
    return [best[i] for i in range(size)] if len(best) == size else None
