"""The rollout service as one object: sessions, gateway, plan, buffer and publisher, put together from the run's configuration.

In: calls of the routes. Out: their results. It owns the turn log and the buffer of one run folder, and runs no user code. What waits
(claims, work) waits on one signal, with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.engine import EngineClient
from palestra.server.gateway.calls import CallDesk
from palestra.server.gateway.opening import SessionDesk
from palestra.server.gateway.session import SessionLimits, SessionTable
from palestra.server.gateway.turns import TurnCore
from palestra.server.ledger import read_ledger
from palestra.server.plan.book import Assignment
from palestra.server.plan.plan import Plan, PlanSettings
from palestra.server.publishing.bodies import EndBody
from palestra.server.publishing.publisher import Publisher
from palestra.server.publishing.types import PublishReport
from palestra.server.renderer.types import Renderer
from palestra.server.signal import Signal
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import LeaseLost, PublishMode, SessionError, TrajectoryGroup
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.types import EnginePlace


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What the service is told at its start."""

    store: Path
    """The run's `store` folder."""
    engine: EnginePlace
    model: str
    """The name that agents see."""
    limits: SessionLimits
    """Of a session that asks for nothing else."""
    plan: PlanSettings
    update_mode: PublishMode
    deadline_s: float
    tasks: Sequence[Mapping[str, Any]] | None = None
    """Tasks of a file; None: the workers' environment has its own."""
    model_folder: Path | None = None
    """Where the model is, for what engines are held to; None: they are held to its tokenizer alone."""
    routed_experts: bool = False
    """Whether every turn keeps the experts of its tokens, for a trainer that replays them."""
    agent_key: str | None = None
    """Opens the model routes of any session that a request names beside it; None: there is no such key."""


class RolloutService:
    """One run's service. `start` before the first call, `close` after the last."""

    def __init__(self, settings: ServiceSettings, renderer: Renderer) -> None:
        self.settings, self.renderer = settings, renderer
        self.signal = Signal()
        self.log = TurnLog(settings.store)
        self.buffer = EmbeddedBuffer(settings.store)
        self.plan = Plan(settings.plan, self.log, self.buffer, self.signal)
        self.engine = EngineClient(settings.engine, deadline_s=settings.deadline_s, decode=renderer.codec.decode)
        self.sessions = SessionTable(settings.agent_key)
        self.core = TurnCore(
            renderer,
            self.engine,
            self.log,
            settings.model,
            self.plan.metrics.add_turn,
            experts=settings.routed_experts,
        )
        self.calls = CallDesk(self.core.run, self.engine.cancel)
        self.desk = SessionDesk(self.log, self.plan, self.sessions, self.calls, settings.limits, renderer.codec)
        self.publisher = Publisher(
            self.engine, settings.engine.kind, self.buffer, settings.update_mode, settings.deadline_s
        )
        self.base_url = ""
        """Where agents reach the model routes; "": where the opener of a session reached us."""
        self._trainer_waits: tuple[float, int] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects, refuses an engine that would corrupt training, and picks up what a former process left open.

        Raises:
            EngineError: the engine is unfit or does not answer.
        """
        await self.engine.open()
        prompt = self.renderer.render([{"role": "user", "content": "Hello"}])
        await self.engine.start(
            ModelFacts.of(prompt.ids, self.renderer.stop_ids, self.settings.model_folder, self.engine.decode)
        )
        if self.settings.tasks is not None:
            self.plan.set_source(len(self.settings.tasks), self.settings.tasks)
        await self.plan.recover()
        self.desk.recover()
        self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Looks for rollouts whose worker is gone, so that no group waits for ever."""
        while True:
            await asyncio.sleep(5.0)
            await self.desk.expire()
            for rollout_id, attempt in await self.plan.expire():
                # The worker may have died before it opened the session.
                if self.sessions.has(rollout_id, attempt):
                    await self.desk.discard(rollout_id, attempt, "worker_lost")

    async def close(self) -> None:
        """Lets go of the engine and the files; everything submitted is durable then."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.engine.close()
        await self.log.close()
        self.buffer.close()

    async def work(self, wait_s: float) -> Assignment | None:
        """The next assignment for a worker, waiting up to `wait_s` for one."""
        deadline = time.monotonic() + wait_s
        while (assignment := await self.plan.take()) is None:
            if not await self.signal.wait(deadline - time.monotonic()):
                return None
        return assignment

    async def claim(
        self, n: int, owner: str, ttl_s: float, wait_s: float, claim_id: str | None = None
    ) -> list[TrajectoryGroup]:
        """`n` ready groups, or none when `wait_s` passed first: never fewer, so a step is never short.

        Groups beyond the staleness bound are dropped before they are counted.
        """
        deadline = time.monotonic() + wait_s
        since = self._trainer_waits[0] if self._trainer_waits else time.monotonic()
        self._trainer_waits = (since, n)
        if claim_id is not None and (again := await asyncio.to_thread(self.buffer.reclaim, claim_id, owner, ttl_s)):
            self._trainer_waits = None
            return again  # the reply to this very claim was lost
        while True:
            stale = await asyncio.to_thread(
                self.buffer.drop_older_than, self.plan.committed_step, self.settings.plan.staleness
            )
            if stale:
                self.signal.notify()
            if self.buffer.ready_count() >= n:
                groups = await asyncio.to_thread(self.buffer.claim, n, owner, ttl_s, claim_id=claim_id)
                self._trainer_waits = None
                return groups
            if not await self.signal.wait(min(deadline - time.monotonic(), 5.0)) and time.monotonic() >= deadline:
                return []

    async def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained.

        Raises:
            SessionError: 409 where the lease was lost.
        """
        before = self.plan.committed_step
        # Before the groups stop counting as claimed: else the plan would see room for groups under the old weights.
        self.plan.committed_step = max(before, step)
        try:
            return await asyncio.to_thread(self.buffer.commit, step, checkpoint_id, group_ids, owner)
        except LeaseLost as error:
            self.plan.committed_step = before
            raise SessionError(str(error), 409, "lease_lost") from error
        finally:
            self.signal.notify()

    async def restore(self, train_step: int, policy_version: int) -> int:
        """A trainer starts from `train_step`, whose weights were version `policy_version`: later commits are undone, groups with tokens of
        abandoned versions dropped. Returns the next version to publish."""
        await asyncio.to_thread(self.buffer.restore, train_step, policy_version)
        self.plan.committed_step = train_step
        self.plan.published_step = None
        return self.buffer.highest_version() + 1

    async def publish_end(self, body: EndBody) -> PublishReport:
        """The new weights are in force; generation for the next step may start."""
        report = await self.publisher.end(body)
        self.plan.published_step = report.train_step
        self.signal.notify()
        return report

    def step_metrics(self) -> dict[str, float]:
        """Rollout-side figures since the last call."""
        return {
            **self.plan.metrics.take(),
            **self.publisher.figures(),
            **self.engine.metrics(),
        }

    def ledger(self) -> dict[str, Any]:
        """Where every sampled token went."""
        return read_ledger(self.settings.store).as_dict()

    def status(self) -> dict[str, Any]:
        """What goes on now, and who waits for whom."""
        load = self.plan.load()
        return {
            "sessions": len(self.sessions),
            "engine_requests": self.engine.on_wire,
            "workers": self.engine.status(),
            "groups": {"open": load.open, "ready": load.ready, "claimed": load.claimed},
            "committed_step": self.plan.committed_step,
            "policy_version": self.buffer.highest_version(),
            "publishing": self.publisher.version,
            "waits": self._waits(),
        }

    def _waits(self) -> str:
        """One sentence: law 7 wants every wait to have a name."""
        if (version := self.publisher.version) is not None:
            return f"engines wait for the weights of version {version}"
        oldest = self.plan.book.oldest_running()
        who = f"; oldest rollout {oldest['rollout_id']} for {oldest['seconds']:.0f} s" if oldest else ""
        if self._trainer_waits is not None:
            since, n = self._trainer_waits
            ready = self.buffer.ready_count()
            return f"trainer waits {time.monotonic() - since:.0f} s for {n - ready} of {n} groups{who}"
        if self.plan.order is None:
            return f"{len(self.sessions)} sessions are open, {self.engine.running} of their calls run"
        if self.plan.published_step is None:
            return "workers wait for the trainer's first publish"
        if not self.plan.book.groups:
            return "workers wait for the trainer"
        return f"{self.plan.book.running()} rollouts go on{who}"
