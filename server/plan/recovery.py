"""The plan's groups as a restart of the service finds them: which rollouts count, which are led through what is on record, which are anew.

In: open groups on record and their sessions. Out: groups for the book. It waits for the store.

Rollouts that ended with a reward keep it. One that was under way goes on where its environment is deterministic: it is played again from
its start under the same attempt, and the gateway gives the recorded replies until there are no more. Otherwise its session is discarded
(restart), and a new attempt begins. Tokens of weights that the run no longer descends from are discarded (abandoned) either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from palestra.server.buffer.types import RunBuffer
from palestra.server.plan.types import OpenGroup, PlanLog, RolloutSlot
from palestra.server.store.types import GroupRecord, SessionState, StoredSession

ABANDONED = "abandoned"
RESTART = "restart"


@dataclass(slots=True)
class Found:
    """One group as it goes on."""

    group: OpenGroup
    again: list[int] = field(default_factory=list)
    """Rollouts that are played anew."""
    replay: list[int] = field(default_factory=list)
    """Rollouts that are led through what is on record of them."""


class Recovery:
    """Decides what goes on."""

    def __init__(self, log: PlanLog, buffer: RunBuffer, retries: int) -> None:
        self.log, self.buffer, self.retries = log, buffer, retries

    async def find(self, record: GroupRecord, *, deterministic: bool, whole: bool) -> Found:
        """The group that a record stands for. `whole`: none of its rollouts counts, since what makes them keeps them together in its own
        memory, and nobody would give a verdict."""
        sessions = self.log.reader.read_sessions(group_id=record.group_id)
        newest: dict[int, StoredSession] = {}
        for stored in sessions:
            at = newest.get(stored.record.index)
            if at is None or stored.record.attempt > at.record.attempt:
                newest[stored.record.index] = stored
        slots = [RolloutSlot(index, record.attempt, self.retries) for index in range(record.size)]
        found = Found(OpenGroup(record.group_id, record.task, record.seed, slots))
        for slot in slots:
            session = newest.get(slot.index)
            if session is None:
                found.again.append(slot.index)
                continue
            found.group.task_id = session.record.task_id
            await self._place(found, slot, session, deterministic and not whole)
        if whole:
            await self._start_over(found, [newest[slot.index] for slot in slots if slot.index in newest])
        return found

    async def _place(self, found: Found, slot: RolloutSlot, session: StoredSession, deterministic: bool) -> None:
        slot.attempt = session.record.attempt
        outcome = session.outcome
        ended = session.state is SessionState.CLOSED and outcome is not None and outcome.reward is not None
        running = session.state is SessionState.OPEN and session.turns > 0 and deterministic
        if ended or running:
            if await asyncio.to_thread(self._descends, session):
                if ended:
                    slot.outcome = outcome
                else:
                    found.replay.append(slot.index)
                return
            await self.log.discard_session(session.record.rollout_id, slot.attempt, ABANDONED)
        elif session.state is SessionState.OPEN:
            await self.log.discard_session(session.record.rollout_id, slot.attempt, RESTART)
        slot.attempt += 1
        found.again.append(slot.index)

    async def _start_over(self, found: Found, sessions: Sequence[StoredSession]) -> None:
        for session in sessions:
            if session.state is not SessionState.DISCARDED:
                await self.log.discard_session(session.record.rollout_id, session.record.attempt, RESTART)
        attempt = 1 + max((session.record.attempt for session in sessions), default=-1)
        for slot in found.group.slots:
            slot.attempt, slot.outcome = attempt, None
        found.again, found.replay = [slot.index for slot in found.group.slots], []

    def _descends(self, session: StoredSession) -> bool:
        trajectory = self.log.reader.read_trajectory(session.record.rollout_id, session.record.attempt)
        return self.buffer.descends({span.version for turn in trajectory.turns for span in turn.spans})
