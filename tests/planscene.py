"""A plan over a real turn log and a real buffer, with a clock that moves when told: rollouts end as a test says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.plan.plan import Plan
from palestra.server.plan.types import Assignment, PlanSettings, Review, WorkerFacts
from palestra.server.signal import Signal
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord
from palestra.server.types import TrajectoryGroup
from tests.fakes.rollouts import turn

DEFAULTS: Mapping[str, Any] = {
    "groups_per_step": 2,
    "group_size": 2,
    "staleness": 0,
    "last_step": 100,
    "drop_zero_variance": True,
    "retries": 1,
    "seed": 0,
    "shuffle": False,
    "rollout_deadline_s": 60.0,
}
FIVE = WorkerFacts(5)
"""What a worker says that has five tasks."""
MINE = {0: 0.0, 1: 1.0}
"""Rewards of a group of two from which something is learned."""


class PlanScene:
    """Open it in a running loop; `close` before the folder is opened again."""

    def __init__(self, folder: Path, *, facts: WorkerFacts = FIVE, **changes: Any) -> None:
        self.now = 1000.0
        self.log = TurnLog(folder)
        self.buffer = EmbeddedBuffer(folder, clock=lambda: self.now)
        self.settings = PlanSettings(**{**DEFAULTS, **changes})
        self.plan = Plan(self.settings, self.log, self.buffer, Signal(), clock=lambda: self.now)
        self.version = self.step = 0
        self.plan.register(facts)

    async def begin(self, train_step: int = 0, policy_version: int = 0) -> None:
        """As a trainer begins: it restores, and publishes."""
        await self.plan.recover()
        self.buffer.restore(train_step, policy_version)
        await self.plan.restored(train_step)
        self.step = train_step
        self.publish()

    def publish(self) -> None:
        """The weights of the present step, under a version of their own."""
        self.version = self.buffer.highest_version() + 1
        self.buffer.record_publish(self.version, self.step)
        self.plan.published(self.step)

    async def work(self) -> Assignment:
        """The next assignment."""
        work = await self.plan.take()
        assert isinstance(work, Assignment), work
        return work

    async def review(self) -> Review:
        """The next review."""
        work = await self.plan.take()
        assert isinstance(work, Review), work
        return work

    async def idle(self) -> bool:
        """Whether there is no work."""
        return await self.plan.take() is None

    async def open(self, work: Assignment, index: int, tokens: int = 3, version: int | None = None) -> SessionRecord:
        """A rollout with one turn of so many sampled tokens."""
        record = SessionRecord(f"{work.group_id}-{index}", work.attempt, work.group_id, "task", index)
        await self.log.open_session(record)
        made = turn(0, None, [1, 2], range(10, 10 + tokens), version=self.version if version is None else version)
        await self.log.append_turn(record.rollout_id, record.attempt, made)
        self.plan.add_turn(made)
        return record

    async def end(self, record: SessionRecord, reward: float | None, **outcome: Any) -> None:
        """The rollout ends."""
        ended = SessionOutcome(reward, stop_reason="answer" if reward is not None else "infra", **outcome)
        await self.log.close_session(record.rollout_id, record.attempt, ended)
        await self.plan.ended(record, ended)

    async def play(
        self, work: Assignment, rewards: Mapping[int, float | None] = MINE, tokens: int = 3, **outcome: Any
    ) -> None:
        """All rollouts of an assignment, from their opening to their end."""
        for index in work.indices:
            await self.end(await self.open(work, index, tokens), rewards[index], **outcome)

    async def claim(self, n: int = 2) -> list[TrajectoryGroup]:
        """What a trainer gets now."""
        return await self.plan.claim(n, "trainer", 60.0)

    async def train(self, n: int = 2, *, publish: bool = True) -> list[str]:
        """A whole train step; the names of its groups."""
        groups = await self.claim(n)
        names = [group.group_id for group in groups]
        assert groups, "nothing to train"
        self.step += 1
        self.plan.committed(self.step)
        self.buffer.commit(self.step, f"step_{self.step}", names, "trainer")
        if publish:
            self.publish()
        return names

    async def close(self) -> None:
        """Lets go of the files."""
        await self.log.close()
        self.buffer.close()
