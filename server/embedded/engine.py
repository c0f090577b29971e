"""The engine: the core's steps in a thread of their own, one after another, and the commands that come between them.

In: calls and commands from the HTTP surface, on one event loop. Out: results, each to the call that waits for it. A
command waits for the step that is running, never longer; a call waits until its request ends, is aborted, or the loop
dies with a fault, which every waiting call is told.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

import torch

from palestra.server.embedded.core import Core, Finished
from palestra.server.embedded.jobs import Job
from palestra.server.embedded.types import EngineDied, GenerateCall, GenerateResult, RequestRefused

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
PAUSE_MODES = ("abort", "retract", "in_place")


class Engine:
    """All methods run on the event loop that `run` runs on."""

    def __init__(self, core: Core, num_threads: int = 0) -> None:
        self.core = core
        self.fault: BaseException | None = None
        self.paused = False
        self._inbox: deque[Job] = deque()
        self._gone: deque[Job] = deque()
        self._waiting: dict[str, tuple[Job, asyncio.Future[GenerateResult]]] = {}
        self._arrivals = 0
        self._lock = asyncio.Lock()  # fair: a command that waits comes before the next step
        self._wake = asyncio.Event()
        # One thread for all of torch's work: OpenMP keeps a pool per calling thread.
        setup = (lambda: torch.set_num_threads(num_threads)) if num_threads else None
        self._thread = ThreadPoolExecutor(1, "engine", initializer=setup)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.core.scheduler.running)

    @property
    def queued(self) -> int:
        """Requests that wait for a place in it."""
        return len(self.core.scheduler.queue) + len(self._inbox)

    @property
    def used_tokens(self) -> int:
        """Tokens of the requests in the batch."""
        return sum(len(job.tokens) for job in self.core.scheduler.running)

    async def run(self) -> None:
        """Generates until cancelled. A fault ends it: `fault` is set, and every waiting call is told."""
        try:
            while True:
                await self._wake.wait()
                async with self.between_steps():
                    if self.paused or not (self.running or self.queued):
                        self._wake.clear()
                    else:
                        self._deliver(await self.in_thread(self.core.step))
        except asyncio.CancelledError:
            self._die(EngineDied("the engine is shutting down"))
            raise
        except Exception as fault:
            log.exception("the generation loop died")
            self._die(fault)
        finally:
            self._thread.shutdown(wait=False)

    async def generate(self, call: GenerateCall) -> GenerateResult:
        """Waits for the request's end. Cancelling this call drops the request.

        Raises:
            EngineDied: the loop has died.
            RequestRefused: a request of the same rid is under way, or stop texts cannot be looked for.
        """
        self._check_alive()
        if call.rid in self._waiting:
            raise RequestRefused(f"a request with rid {call.rid!r} is under way already")
        self._arrivals += 1
        job = self.core.job(call, self._arrivals)
        future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._waiting[call.rid] = (job, future)
        self._inbox.append(job)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._gone.append(job)
            self._wake.set()
            raise
        finally:
            del self._waiting[call.rid]

    async def abort(self, rid: str | None) -> int:
        """Ends one request, or all (None): each answers with what it has. Returns how many."""
        async with self.between_steps():
            return self._abort(lambda job: rid is None or job.call.rid == rid)

    async def pause(self, mode: str) -> None:
        """No further step is made until `resume`; new requests wait.

        Raises:
            RequestRefused: unknown mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestRefused(f"mode {mode!r} is not one of {', '.join(PAUSE_MODES)}")
        async with self.between_steps():
            self.paused = True
            if mode == "abort":
                self._abort(lambda job: True)
            elif mode == "retract":
                await self.in_thread(self.core.retract_all)

    async def resume(self) -> None:
        """Goes on after a pause; without one it does nothing."""
        async with self.between_steps():
            self.paused = False
            self._wake.set()

    async def flush(self) -> None:
        """Empties the prefix store. Running requests keep what they have."""
        async with self.between_steps():
            self.core.scheduler.store.clear()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """No step runs inside; what arrived and what is gone has been taken into account. To be held for short: generation stands.

        Raises:
            EngineDied: the loop has died.
        """
        async with self._lock:
            self._check_alive()
            while self._inbox:
                self.core.scheduler.add(self._inbox.popleft())
            while self._gone:
                job = self._gone.popleft()
                self._abort(lambda other, job=job: other is job)  # type: ignore[misc]
            yield

    def _abort(self, wanted: Callable[[Job], bool]) -> int:
        scheduler = self.core.scheduler
        jobs = [job for job in [*scheduler.running, *scheduler.queue] if wanted(job)]
        reason = {"type": "abort", "message": "aborted by request"}
        self._deliver([self.core.finish(job, reason) for job in jobs])
        return len(jobs)

    def _deliver(self, finished: list[Finished]) -> None:
        for job, result in finished:
            owner, future = self._waiting.get(job.call.rid, (None, None))
            # A rid whose caller has gone may be in use again by now.
            if owner is job and future is not None and not future.done():
                future.set_result(result)

    def _die(self, fault: BaseException) -> None:
        self.fault = self.fault or fault
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDied(self._obituary()))

    def _check_alive(self) -> None:
        if self.fault is not None:
            raise EngineDied(self._obituary())

    def _obituary(self) -> str:
        return f"the generation loop has died: {type(self.fault).__name__}: {self.fault}"

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs torch's work off the event loop. A cancelled caller still waits for it: the core is never used by two."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(function, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            with suppress(Exception):
                await work
            raise
