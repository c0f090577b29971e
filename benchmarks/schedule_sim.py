"""A training run in virtual time: simulated engines and a simulated trainer around the real plan, turn log and buffer.

In: a run's settings and the world's speeds. Out: what the run trained, and who stood idle. The plan decides what is opened, dropped,
masked and claimed, on a clock that this module moves from event to event; nothing sleeps. It waits for the store's files only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedule_model import CAP, Engine, Replies, Request
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.plan.plan import Plan
from palestra.server.plan.types import Assignment, PlanSettings, WorkerFacts
from palestra.server.signal import Signal
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord
from palestra.server.types import U8, TokenSource, TrajectoryGroup, Turn, VersionSpan

OWNER, LEASE_S = "trainer", 1e9
LEAST_S = 1e-9
"""The clock moves by so much at least, however a sum of times was rounded."""
PROMPT = np.arange(2, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class World:
    """Speeds, and what is played."""

    replies: Replies
    engines: int
    slots: int
    """Of each engine."""
    train_token_s: float
    """Seconds that a trained or masked token takes in a step."""
    publish_s: float
    """Engines and trainer stand still so long for new weights."""


@dataclass(slots=True)
class Watched:
    """Sums over the steps that are watched."""

    seconds: float = 0.0
    waited_s: float = 0.0
    """The trainer waited for groups."""
    trained_s: float = 0.0
    publish_s: float = 0.0
    slot_s: float = 0.0
    busy_s: float = 0.0
    """Slot-seconds, and those that sampled."""
    waiting_slot_s: float = 0.0
    waiting_busy_s: float = 0.0
    """The same while the trainer waited."""
    steps: int = 0
    groups: int = 0
    trained: int = 0
    masked: int = 0
    """Sampled tokens in claimed groups."""
    ages: list[int] = field(default_factory=list)
    """Train steps between the oldest trained token of a rollout and its training."""


class Inline(ThreadPoolExecutor):
    """Runs what is handed to it at once: the store's files need no threads here, and each hop to one costs more than the work."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The call's result, or its error."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - its waiter is told, as by a thread
            future.set_exception(error)
        return future


class Simulation:
    """One run. `run` once."""

    def __init__(self, settings: PlanSettings, world: World, store: Path) -> None:
        """`store`: an empty folder for the turn log and the buffer."""
        self.now = 0.0
        self.settings, self.world = settings, world
        self.log = TurnLog(store)
        self.buffer = EmbeddedBuffer(store, clock=self._clock)
        self.plan = Plan(settings, self.log, self.buffer, Signal(), clock=self._clock)
        self.plan.register(WorkerFacts(None))
        self.engines = [Engine(world.slots) for _ in range(world.engines)]
        self.step = self.version = 0
        self.watched = Watched()
        self._claimed: list[str] = []
        self._writes: list[asyncio.Future[Any]] = []
        self._changed = True
        """Whether workers and the trainer should ask the plan again: a group's end, the trainer or a spent budget changes its answers."""
        self._phase, self._until = "publish", world.publish_s
        self._watching, self._watch_from = False, 0

    def _clock(self) -> float:
        return self.now

    async def run(self, warmup: int, steps: int) -> Watched:
        """Trains `warmup` steps, and then `steps` that are watched.

        Raises:
            RuntimeError: nothing can happen any more: the schedule waits for itself.
        """
        asyncio.get_running_loop().set_default_executor(Inline(1))
        self.buffer.record_publish(0, 0)
        self._freeze(True)
        self._watch_from = warmup
        try:
            while self.step < warmup + steps or self._phase == "publish":
                if self._changed:
                    self._changed = False
                    await self._feed()
                    if self._phase == "wait":
                        await self._claim()
                await self._next()
            await asyncio.gather(*self._writes)
        finally:
            await self.log.close()
            self.buffer.close()
        self.watched.steps = steps
        return self.watched

    async def _feed(self) -> None:
        """Workers take what the plan gives; a group goes to the engine with the least to do."""
        while isinstance(work := await self.plan.take(), Assignment):
            engine = min(self.engines, key=lambda each: each.load)
            lengths, _ = self.world.replies.group(int(work.group_id[1:]))
            for index in work.indices:
                name = f"{work.group_id}-{index}"
                engine.submit(Request(name, work.group_id, index, work.attempt, lengths[index]))

    async def _claim(self) -> None:
        groups = await self.plan.claim(self.settings.groups_per_step, OWNER, LEASE_S)
        if not groups:
            return
        self._changed = True
        self._claimed = [group.group_id for group in groups]
        tokens = self._count(groups)
        self._phase, self._until = "train", self.now + tokens * self.world.train_token_s
        if self.settings.colocated:
            self._freeze(True)

    def _count(self, groups: Iterable[TrajectoryGroup]) -> int:
        """Notes what is trained; returns the sampled tokens of all rows, each of which takes its time in the step."""
        rows = [row for group in groups for row in group.samples]
        sampled = sum(int((row.sources != TokenSource.PROMPT).sum()) for row in rows)
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        if self._watching:
            seen = self.watched
            seen.groups += len({row.group_id for row in rows})
            seen.trained += trained
            seen.masked += sampled - trained
            seen.ages += [self._age(row.spans, row.loss_mask) for row in rows if row.loss_mask.any()]
        return sampled

    def _age(self, spans: Iterable[VersionSpan], mask: U8) -> int:
        oldest = min(span.version for span in spans if mask[span.start : span.end].any())
        return self.step - self.buffer.train_step_of(oldest)

    async def _next(self) -> None:
        """Moves the clock to the next event and lets it happen."""
        ends = [engine.next_end() for engine in self.engines]
        trainer = self._trainer_at()
        at = min(*ends, trainer)
        if not math.isfinite(at):
            raise RuntimeError(
                f"step {self.step + 1}: nothing goes on and nothing is ready: {len(self.plan.book.groups)} are open"
            )
        self._advance(at)
        if at == trainer:
            await self._trainer_event()
        else:
            await self._ended(self.engines[ends.index(at)].take_ended())

    def _trainer_at(self) -> float:
        """When the trainer does something by itself: it ends a step or a publish, or asks again since the budget is spent."""
        left = self.plan.budget.seconds_left
        if self._phase == "wait" and left > 0:
            return self.now + max(left, LEAST_S)
        return self._until

    def _advance(self, at: float) -> None:
        passed, self.now = at - self.now, at
        busy = 0.0
        for engine in self.engines:
            before = engine.busy_s
            engine.advance(at)
            busy += engine.busy_s - before
        if not self._watching:
            return
        seen, slots = self.watched, passed * self.world.engines * self.world.slots
        seen.seconds += passed
        seen.slot_s += slots
        seen.busy_s += busy
        if self._phase == "wait":
            seen.waited_s += passed
            seen.waiting_slot_s += slots
            seen.waiting_busy_s += busy
        elif self._phase == "train":
            seen.trained_s += passed
        else:
            seen.publish_s += passed

    async def _trainer_event(self) -> None:
        self._changed = True
        if self._phase == "train":
            self.step += 1
            self.plan.committed(self.step)
            self.buffer.commit(self.step, "c", self._claimed, OWNER)
            self._freeze(True)
            self._phase, self._until = "publish", self.now + self.world.publish_s
        elif self._phase == "publish":
            for engine in self.engines:
                engine.change(self.version)
            if self.step:
                self.version += 1
                self.buffer.record_publish(self.version, self.step)
            self._freeze(False)
            self._phase, self._until = "wait", math.inf
            self._watching = self.step >= self._watch_from
            self.plan.published(self.step)

    def _freeze(self, frozen: bool) -> None:
        for engine in self.engines:
            engine.frozen = frozen

    async def _ended(self, request: Request) -> None:
        """A rollout's last token: its turn and its end go on record, and the plan hears of both."""
        _, rewards = self.world.replies.group(int(request.group_id[1:]))
        record = SessionRecord(request.name, request.attempt, request.group_id, "task", request.index)
        cut = request.tokens == CAP
        outcome = SessionOutcome(rewards[request.index], stop_reason="length" if cut else "answer", truncated=cut)
        turn = self._turn(request)
        self._writes += [
            self.log.open_session(record),
            self.log.append_turn(request.name, request.attempt, turn),
            self.log.close_session(request.name, request.attempt, outcome),
        ]
        if sum(slot.outcome is None for slot in self.plan.book.groups[request.group_id].slots) == 1:
            await asyncio.gather(*self._writes)  # the plan reads the group back once its last rollout has ended
            self._writes.clear()
            self._changed = True
        spent = self.plan.budget.spent
        self.plan.add_turn(turn)
        self._changed |= self.plan.budget.spent and not spent
        await self.plan.ended(record, outcome)

    def _turn(self, request: Request) -> Turn:
        ends = [*request.spans, (self.version, request.tokens)]
        starts = [0, *(end for _, end in ends[:-1])]
        spans = tuple(VersionSpan(v, start, end) for start, (v, end) in zip(starts, ends, strict=True) if end > start)
        ids = np.arange(request.tokens, dtype=np.int32)
        return Turn(0, None, PROMPT, 0, ids, np.full(request.tokens, -1.0, np.float32), "stop", spans, 1.0)
