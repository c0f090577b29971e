"""Boxes that are ready when they are asked for. One episode per box: what was used is destroyed, never handed out again.

In: a backend that was started, and what most boxes are like. Out: boxes, in the order of asking. Waits for the backend and for those who
hold boxes; every such wait has a deadline. All state changes happen in one event loop between two awaits, so there is no lock: whoever
changes something calls `_arrange`, which hands out what there is and begins what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from palestra.sandbox.admission import Admission, memory_here
from palestra.sandbox.making import PATIENCE_S, Maker
from palestra.sandbox.types import (
    MIB,
    Backend,
    Box,
    BoxSpec,
    SandboxBusyError,
    SandboxError,
    SandboxUnavailableError,
)
from palestra.sandbox.waiting import Lease, Waiter, whereabouts

logger = logging.getLogger(__name__)

REFILLS = 2
"""Boxes that are made ahead at a time: more would take the cores from code that runs."""


class Pool:
    """Warm boxes of one spec, others on request."""

    def __init__(
        self,
        backend: Backend,
        spec: BoxSpec,
        *,
        boxes: int,
        warm: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """
        Args:
            backend: started already; `close` leaves it as it is.
            spec: of warm boxes, and of those that are asked for without a spec.
            boxes: most boxes in being at a time: used, warm, being made, being destroyed.
            warm: boxes kept ready; None: one and a half per core, at most half of `boxes`.
            memory_bytes: most sum of the boxes' `Limits.memory_bytes`; None: a share of what is free here (remote boxes: no bound).
        """
        if memory_bytes is None and backend.name != "remote":
            memory_bytes = memory_here()
        self.backend, self.spec = backend, spec
        self._maker = Maker(backend)
        self._counts = self._maker.counts
        self._room = Admission(boxes, memory_bytes)
        self._room.check(spec)
        if (most := self._room.most(spec)) < boxes:
            logger.warning(
                "the sandbox pool's memory (%d MiB) holds %d boxes of its %d", (memory_bytes or 0) // MIB, most, boxes
            )
        usual = max(1, min(boxes // 2, (3 * (os.cpu_count() or 1) + 1) // 2))
        self._target = min(usual if warm is None else warm, most)
        self._warm: deque[Box] = deque()
        self._waiters: deque[Waiter] = deque()
        self._leases: dict[int, Lease] = {}
        self._making: dict[asyncio.Task[None], BoxSpec] = {}
        self._leaving: dict[int, tuple[BoxSpec, asyncio.Task[None]]] = {}
        self._refilling = 0
        self._resting = True
        self._ending: asyncio.Task[None] | None = None
        self._wait_s = 0.0

    async def start(self) -> None:
        """Makes the first box, so that what cannot work is known at once; the others follow behind. With `warm=0` nothing is made.

        Raises:
            SandboxUnavailableError: such boxes cannot be had.
            SandboxError: none could be made.
        """
        if self._target == 0:
            return
        self._resting = False
        box = await self.acquire(timeout=PATIENCE_S)
        self._put_back(box)

    @asynccontextmanager
    async def box(self, spec: BoxSpec | None = None, timeout: float = 60.0) -> AsyncIterator[Box]:
        """A box for as long as the block lasts; then it is destroyed. Arguments and errors as of `acquire`."""
        box = await self.acquire(spec, timeout)
        try:
            yield box
        finally:
            await self.release(box)

    async def acquire(self, spec: BoxSpec | None = None, timeout: float = 60.0) -> Box:
        """A box that nothing ran in, to be given back by `release`. Who asked first has it first.

        Raises:
            SandboxBusyError: none within `timeout` seconds, or the pool was closed.
            SandboxUnavailableError: a box of this spec cannot be had.
            SandboxError: it could not be made, also after several tries.
        """
        wanted = self.spec if spec is None else spec
        self._room.check(wanted)
        if self._maker.stopped:
            raise SandboxBusyError("the sandbox pool is closed")
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        waiter = Waiter(wanted, loop.create_future(), task.get_name() if task else "nobody's task")
        self._waiters.append(waiter)
        self._arrange()
        timer = None if waiter.future.done() else loop.call_later(timeout, self._expire, waiter, timeout)
        try:
            box = await waiter.future
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            self._wait_s += time.monotonic() - waiter.since
            if timer is not None:
                timer.cancel()
        if self._maker.stopped:
            await self.release(box)
            raise SandboxBusyError("the sandbox pool was closed")
        self._counts["acquired_total"] += 1
        return box

    async def release(self, box: Box) -> None:
        """Destroys a box of `acquire`; returns when it is gone. One that was given back already is waited for, if it still goes."""
        lease = self._leases.pop(id(box), None)
        if lease is not None:
            self._destroy(lease.box)
        leaving = self._leaving.get(id(box))
        if leaving is not None:
            await asyncio.shield(leaving[1])

    def figures(self) -> dict[str, float]:
        """What there is now, and what there was in all (`*_total`), for metrics."""
        totals = {name: float(self._counts[name]) for name in COUNTED}
        return {
            "boxes": float(self._room.boxes),
            "memory_limit_bytes": float(self._room.memory_bytes or 0),
            "memory_bytes": float(self._room.taken_bytes),
            "in_use": float(len(self._leases)),
            "warm": float(len(self._warm)),
            "creating": float(len(self._making)),
            "closing": float(len(self._leaving)),
            "waiting": float(len(self._waiters)),
            **totals,
            "wait_s_total": self._wait_s,
            "create_s_total": self._maker.create_s,
        }

    async def close(self) -> None:
        """Destroys all boxes, those in use too, and tells who waits. Safe to call twice, and at once."""
        if self._ending is None:
            self._maker.stop()
            self._ending = asyncio.create_task(self._close())
        await asyncio.shield(self._ending)

    async def _close(self) -> None:
        for waiter in self._waiters:
            waiter.tell(SandboxBusyError("the sandbox pool was closed"))
        self._waiters.clear()
        for box in (*self._warm, *(lease.box for lease in self._leases.values())):
            self._destroy(box)
        self._warm.clear()
        self._leases.clear()
        # A box that is being made is not cancelled: its maker ends by itself, within its deadline, and destroys what it made.
        while pending := [*self._making, *(task for _, task in self._leaving.values())]:
            await asyncio.wait(pending)

    def _arrange(self) -> None:
        """Hands out what is there, begins what is missing. Nobody overtakes: who comes behind one without room waits too."""
        if self._maker.stopped:
            return
        self._drop_dead()
        coming = Counter(self._making.values())
        for waiter in list(self._waiters):
            if waiter.future.done():  # cancelled, and about to leave
                continue
            if waiter.spec == self.spec and self._warm:
                self._counts["warm_hits_total"] += 1
                self._hand(waiter, self._warm.popleft())
            elif coming[waiter.spec] > 0:
                coming[waiter.spec] -= 1
            elif self._room.fits(waiter.spec):
                self._make(waiter.spec)
            else:
                self._evict_for(waiter.spec)
                return
        while (
            not self._resting
            and self._refilling < REFILLS
            and len(self._warm) + coming[self.spec] < self._target
            and self._room.fits(self.spec)
        ):
            coming[self.spec] += 1
            self._make(self.spec, ahead=True)

    def _drop_dead(self) -> None:
        for box in [box for box in self._warm if not box.alive]:
            self._warm.remove(box)
            self._counts["dead_warm_total"] += 1
            self._destroy(box)

    def _evict_for(self, spec: BoxSpec) -> None:
        """Gives up warm boxes for one of another spec that has no room, if that helps once all that leave are gone."""
        leaving = [gone for gone, _ in self._leaving.values()]
        if not self._room.fits(spec, (*leaving, *(box.spec for box in self._warm))):
            return
        while self._warm and not self._room.fits(spec, tuple(leaving)):
            box = self._warm.popleft()
            leaving.append(box.spec)
            self._destroy(box)

    def _hand(self, waiter: Waiter, box: Box) -> None:
        self._waiters.remove(waiter)
        self._leases[id(box)] = Lease(box, waiter.holder)
        waiter.future.set_result(box)

    def _abandon(self, waiter: Waiter) -> None:
        """Who asked was cancelled. Nothing ran in a box that it was given meanwhile: the next one has it."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self._put_back(future.result())
        else:
            self._arrange()

    def _put_back(self, box: Box) -> None:
        """A box of `acquire` that was not used."""
        if self._leases.pop(id(box), None) is not None:
            self._offer(box)
            self._arrange()

    def _offer(self, box: Box) -> None:
        """A box that nothing ran in: to the first who wants such a one, else to the warm ones, else away."""
        waiter = next((each for each in self._waiters if each.spec == box.spec and not each.future.done()), None)
        if self._maker.stopped or not box.alive:
            self._destroy(box)
        elif waiter is not None:
            self._hand(waiter, box)
        elif box.spec == self.spec and len(self._warm) < self._target:
            self._warm.append(box)
        else:
            self._destroy(box)

    def _make(self, spec: BoxSpec, *, ahead: bool = False) -> None:
        self._room.take(spec)
        self._refilling += ahead
        task = asyncio.create_task(self._making_of(spec, ahead), name="palestra-sandbox-make")
        self._making[task] = spec
        task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making.pop(task, None)
        self._arrange()

    async def _making_of(self, spec: BoxSpec, ahead: bool) -> None:
        """Makes a box and offers it, or tells who waits why there is none. Never raises."""
        before = self._counts["created_total"]
        try:
            box = await self._maker.create(spec)
        except SandboxError as error:
            self._room.give(spec)
            self._resting = self._resting or spec == self.spec
            # While others of this time succeed it is one box's misfortune; else it would befall all who wait for such a box.
            alone = self._counts["created_total"] > before and not isinstance(error, SandboxUnavailableError)
            self._fail(spec, error, only_first=alone)
        else:
            self._resting = self._resting and spec != self.spec
            self._offer(box)
        finally:
            self._refilling -= ahead

    def _fail(self, spec: BoxSpec, error: SandboxError, *, only_first: bool) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter.spec == spec][: 1 if only_first else None]:
            self._waiters.remove(waiter)
            waiter.tell(error)

    def _expire(self, waiter: Waiter, timeout: float) -> None:
        if waiter.future.done():
            return
        self._waiters.remove(waiter)
        self._counts["busy_total"] += 1
        waiter.tell(SandboxBusyError(f"no box within {timeout:g} s: {self._state()}"))
        self._arrange()

    def _state(self) -> str:
        leases = self._leases.values()
        return whereabouts(
            self._room, leases, len(self._warm), len(self._making), len(self._leaving), len(self._waiters)
        )

    def _destroy(self, box: Box) -> None:
        task = asyncio.create_task(self._destroying_of(box), name="palestra-sandbox-destroy")
        self._leaving[id(box)] = (box.spec, task)

    async def _destroying_of(self, box: Box) -> None:
        # Its place is given on whatever came of it: a pool that waits for such a box for ever serves nobody.
        await self._maker.destroy(box)
        self._leaving.pop(id(box), None)
        self._room.give(box.spec)
        self._arrange()


COUNTED = (
    "acquired_total",
    "busy_total",
    "close_failures_total",
    "create_failures_total",
    "created_total",
    "dead_warm_total",
    "destroyed_total",
    "warm_hits_total",
)
