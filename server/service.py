"""The rollout service as one object: sessions, gateway, plan, buffer and publisher, put together from the run's configuration.

In: calls of the routes. Out: their results. It owns the turn log and the buffer of one run folder, and runs no user code. What waits
(claims, work) waits on one signal, with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.agents.types import Verdict
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.types import RunBuffer
from palestra.server.busy import Busy
from palestra.server.engine import EngineClient
from palestra.server.gateway.calls import CallDesk
from palestra.server.gateway.opening import SessionDesk
from palestra.server.gateway.session import SessionLimits, SessionTable
from palestra.server.gateway.turns import TurnCore
from palestra.server.ledger import read_ledger
from palestra.server.plan.filters import filtered
from palestra.server.plan.finishing import MASK
from palestra.server.plan.handmade import check_on_record
from palestra.server.plan.plan import Plan
from palestra.server.plan.status import queue_figures, waits
from palestra.server.plan.types import Load, PlanSettings, Work
from palestra.server.publishing.bodies import EndBody
from palestra.server.publishing.publisher import Publisher
from palestra.server.publishing.types import PublishReport
from palestra.server.renderer.types import Renderer
from palestra.server.rows import Masks, rows_of_open, with_masks
from palestra.server.signal import Signal
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import LeaseLost, PublishMode, SampleError, SessionError, TrajectoryGroup
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.types import EnginePlace

UNPLAYED = "unplayed"
"""Why a rollout has no tokens to train on: the run's own program kept its group without it."""


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
    open_buffer: Callable[[Path], RunBuffer] = EmbeddedBuffer
    """Opens the run's buffer, given its `store` folder."""
    places: int = 64
    """Requests that all engines together decode at a time; for figures alone."""
    agent_key: str | None = None
    """Opens the model routes of any session that a request names beside it; None: there is no such key."""


class RolloutService:
    """One run's service. `start` before the first call, `close` after the last."""

    def __init__(self, settings: ServiceSettings, renderer: Renderer) -> None:
        self.settings, self.renderer = settings, renderer
        self.signal = Signal()
        self.log = TurnLog(settings.store)
        self.buffer: RunBuffer = settings.open_buffer(settings.store)
        self.plan = Plan(settings.plan, self.log, self.buffer, self.signal)
        self.engine = EngineClient(
            settings.engine, deadline_s=settings.deadline_s, decode=renderer.codec.decode, places=settings.places
        )
        self.sessions = SessionTable(settings.agent_key)
        self.core = TurnCore(
            renderer,
            self.engine,
            self.log,
            settings.model,
            self.plan.add_turn,
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
        self._resting = False
        """Whether engines rest while a step trains."""
        self._training_since: Busy | None = None
        self._overlap: Busy | None = None
        """What engines did while the last step was trained."""
        self._metrics_since = self.engine.busy.read()
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
            self.plan.set_tasks(self.settings.tasks)
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

    async def work(self, wait_s: float, *, reviews_only: bool = False) -> Work | None:
        """The next work for a worker, waiting up to `wait_s` for some; `reviews_only`: it has no place for rollouts."""
        began = time.monotonic()
        while (work := await self.plan.take(reviews_only=reviews_only)) is None:
            who = "workers_for_weights" if self.plan.published_step is None else "workers_for_room"
            woken = await self.signal.wait(began + wait_s - time.monotonic())
            if not woken:
                if not reviews_only:
                    self.plan.metrics.add_wait(who, time.monotonic() - began)
                return None
        return work

    async def claim(
        self, n: int, owner: str, ttl_s: float, wait_s: float, claim_id: str | None = None
    ) -> list[TrajectoryGroup]:
        """`n` ready groups; fewer where the step's budget is spent; none when `wait_s` passed first.

        Groups beyond the staleness bound are dropped, or masked, before they are counted. Engines that share the trainer's devices rest
        from here to the next claim or publish.
        """
        began = time.monotonic()
        since = self._trainer_waits[0] if self._trainer_waits else began
        self._trainer_waits = (since, n)
        self._let_generate()
        if claim_id is not None and (
            again := await self.plan.claims.again(claim_id, owner, ttl_s, self.plan.committed_step)
        ):
            return await self._claimed(again, began)  # the reply to this very claim was lost
        while not (groups := await self.plan.claim(n, owner, ttl_s, claim_id)):
            left = began + wait_s - time.monotonic()
            if left <= 0:
                self.plan.metrics.add_wait("trainer_for_groups", time.monotonic() - began)
                return []
            await self.signal.wait(min(left, 5.0, max(self.plan.budget.seconds_left, 0.01)))
        return await self._claimed(groups, began)

    async def _claimed(self, groups: list[TrajectoryGroup], began: float) -> list[TrajectoryGroup]:
        self._trainer_waits = None
        self.plan.metrics.add_wait("trainer_for_groups", time.monotonic() - began)
        self._training_since = self.engine.busy.read()
        if self.settings.plan.colocated and not self._resting:
            await self.engine.freeze()
            self._resting = True
        return groups

    def _let_generate(self) -> None:
        """Engines that rested while a step was trained go on, with the requests first that began first."""
        if self._resting:
            self.engine.thaw()
            self._resting = False

    async def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained.

        Raises:
            SessionError: 409 where the lease was lost.
        """
        before = self.plan.committed_step
        # Before the groups stop counting as claimed: else the plan would see room for groups under the old weights.
        self.plan.committed(max(before, step))
        try:
            count = await asyncio.to_thread(self.buffer.commit, step, checkpoint_id, group_ids, owner)
        except LeaseLost as error:
            self.plan.committed(before)
            raise SessionError(str(error), 409, "lease_lost") from error
        finally:
            self.signal.notify()
        if self._training_since is not None:
            self._overlap = self.engine.busy.read().since(self._training_since)
            self._training_since = None
        return count

    async def restore(self, train_step: int, policy_version: int) -> int:
        """A trainer starts from `train_step`, whose weights were version `policy_version`: later commits are undone, groups with tokens of
        abandoned versions dropped, and their tasks owed. Returns the next version to publish."""
        self._let_generate()
        await asyncio.to_thread(self.buffer.restore, train_step, policy_version)
        await self.plan.restored(train_step)
        return await asyncio.to_thread(self.buffer.highest_version) + 1

    async def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Groups that somebody made of closed sessions; returns how many were new.

        Raises:
            SessionError: 400 where a row says anything but what is on record.
        """
        try:
            await asyncio.to_thread(check_on_record, groups, self.log.reader)
            count = await asyncio.to_thread(self.buffer.put, groups)
        except SampleError as error:
            raise SessionError(str(error), 400, "groups_refused") from error
        self.signal.notify()
        return count

    async def keep_masks(self, rollout_id: str, attempt: int | None, masks: Masks) -> None:
        """Keeps masks made by hand until the session's group is complete.

        Raises:
            SessionError: 404 for a session that is not open, 400 for masks that break law 2.
        """
        session = self.sessions.by_id(rollout_id, attempt)
        attempt = session.record.attempt
        found = await asyncio.to_thread(self.log.reader.read_trajectory, rollout_id, attempt)
        try:
            with_masks(rows_of_open(found), masks)
        except SampleError as error:
            raise SessionError(str(error), 400, "mask_refused") from error
        await self.log.add_event(rollout_id, attempt, MASK, {"masks": [list(mask) for mask in masks]})

    async def judge(self, group_id: str, verdict: Verdict) -> None:
        """What the run's own program says of a group; rollouts of it that go on are ended.

        Raises:
            SessionError: 404 for a group that never was, 400 for a verdict that fits none.
        """
        reason = filtered(verdict.reason) if not verdict.keep else UNPLAYED
        for rollout_id, attempt in await self.plan.judge(group_id, verdict):
            # It may be that no session was opened for it.
            if self.sessions.has(rollout_id, attempt):
                await self.desk.discard(rollout_id, attempt, reason)
            else:
                await self.plan.give_up(group_id, rollout_id, attempt, reason)

    async def publish_end(self, body: EndBody) -> PublishReport:
        """The new weights are in force; generation for the next step may start."""
        report = await self.publisher.end(body)
        self._let_generate()
        self.plan.published(report.train_step)
        return report

    async def step_metrics(self) -> dict[str, float]:
        """Rollout-side figures since the last call."""
        reading = self.engine.busy.read()
        since, self._metrics_since = reading.since(self._metrics_since), reading
        overlap = {} if self._overlap is None else {"overlap/generation_train/share": self._overlap.share}
        return {
            **self.plan.metrics.take(),
            **self.publisher.figures(),
            **self.engine.metrics(),
            **await queue_figures(self.plan),
            "bubble/engine/share": since.idle_share(self.engine.busy.places),
            **overlap,
        }

    async def ledger(self) -> dict[str, Any]:
        """Where every sampled token went."""
        return (await asyncio.to_thread(read_ledger, self.settings.store)).as_dict()

    async def status(self) -> dict[str, Any]:
        """What goes on now, and who waits for whom."""
        load = await self.plan.load()
        return {
            "sessions": len(self.sessions),
            "engine_requests": self.engine.on_wire,
            "workers": self.engine.status(),
            "groups": {
                "open": load.open,
                "ready": load.ready,
                "claimed": load.claimed,
                "reviews": len(self.plan.reviews),
            },
            "committed_step": self.plan.committed_step,
            "policy_version": await asyncio.to_thread(self.buffer.highest_version),
            "publishing": self.publisher.version,
            "waits": self._waits(load),
        }

    def _waits(self, load: Load) -> str:
        if (version := self.publisher.version) is not None:
            return f"engines wait for the weights of version {version}"
        if self._trainer_waits is None and self.plan.order is None:
            return f"{len(self.sessions)} sessions are open, {self.engine.running} of their calls run"
        return waits(self.plan, load, self._trainer_waits)
