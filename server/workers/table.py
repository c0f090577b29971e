"""The fleet: which workers there are, which of them may have requests, and control calls to them.

In: verdicts of whoever finds a worker unfit or fit (the publisher, the watcher, a request that failed). Out: a router that sends requests
to the fit ones only. State changes at once, the router follows within seconds; all waits are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from palestra.server.types import EngineError, EngineRefused
from palestra.server.workers.calls import Calls
from palestra.server.workers.router import RouterApi
from palestra.server.workers.types import (
    Answers,
    EnginePlace,
    Weights,
    Worker,
    WorkerDown,
    WorkerSilent,
    WorkerState,
)

log = logging.getLogger(__name__)
ALIVE_S = 5.0
"""A worker that says nothing for so long is taken for frozen."""
LISTED_S = 60.0
"""How long a router may take at the start to answer and to list a worker."""


class WorkerTable:
    """The one `Fleet` of a service."""

    def __init__(self, place: EnginePlace, calls: Calls) -> None:
        self.place, self.calls = place, calls
        self.alive_s = ALIVE_S
        """How long a worker may take to answer a small call, seconds."""
        self.era = 0
        """Changes whenever an update begins or ends: what was seen in another era says nothing of this one."""
        self.wanted: Weights | None = None
        """The weights in force; None until they are known."""
        self.quarantines = 0
        """How often a worker was quarantined."""
        self.stranded = False
        """Set where requests may be at a worker that does not answer: somebody has to take them off it."""
        self.router = RouterApi(place.url.rstrip("/"), calls) if place.router else None
        self._updating = False
        self._agents = {url.rstrip("/"): agent.rstrip("/") for url, agent in place.agents.items()}
        self._workers: dict[str, Worker] = {}
        self._tainted: set[str] = set()
        self._suspecting: asyncio.Task[None] | None = None
        if place.workers or self.router is None:
            for url in place.workers or (place.url,):
                self._join(url)

    @property
    def updating(self) -> bool:
        """See `Fleet.updating`."""
        return self._updating

    @updating.setter
    def updating(self, value: bool) -> None:
        self.era += value is not self._updating
        self._updating = value

    def _join(self, url: str) -> Worker:
        url = url.rstrip("/")
        worker = self._workers[url] = Worker(url, agent=self._agents.get(url))
        return worker

    async def open(self) -> None:
        """Learns the workers from the router where nobody named them.

        Raises:
            EngineError: the router does not answer, or has none.
        """
        if self.router is None or self._workers:
            return
        loop = asyncio.get_running_loop()
        deadline, last = loop.time() + LISTED_S, "it lists no worker"
        while not self._workers:
            try:
                for url in await self.router.workers():
                    self._join(url)
            except EngineError as error:
                last = str(error)
            if not self._workers and loop.time() > deadline:
                raise EngineError(
                    f"no worker behind the router {self.place.url} within {LISTED_S:.0f} s ({last}): start engines and add them to it"
                )
            await asyncio.sleep(0.0 if self._workers else 0.5)

    def close(self) -> None:
        """Ends what goes on in the background."""
        if self._suspecting is not None:
            self._suspecting.cancel()

    # Who they are.

    def serving(self) -> list[Worker]:
        """See `Fleet`."""
        return [worker for worker in self._workers.values() if worker.state is WorkerState.SERVING]

    def members(self) -> list[Worker]:
        """See `Fleet`."""
        return list(self._workers.values())

    def member(self, url: str) -> Worker:
        """By its URL."""
        return self._workers[url]

    def reachable(self) -> list[Worker]:
        """Whom control calls go to: the serving ones; where none is, all."""
        return self.serving() or self.members()

    def tainted(self, worker: Worker) -> bool:
        """Whether its weights are not to be trusted, whatever version it names: it needs others before it serves again."""
        return worker.url in self._tainted

    def newcomer(self, url: str) -> Worker:
        """A worker that somebody added to the router: it serves once it is known to be fit."""
        worker = self._join(url)
        worker.state, worker.why = WorkerState.QUARANTINED, "came late"
        log.warning("worker %s came late: it has requests once it has the weights in force", url)
        return worker

    # Control calls.

    async def ask(
        self, workers: Sequence[Worker], path: str, payload: Mapping[str, Any], *, timeout_s: float
    ) -> Answers:
        """See `Fleet`."""
        return await self._each(workers, lambda url: self.calls.post(url + path, payload, timeout_s))

    async def look(self, workers: Sequence[Worker], path: str, *, timeout_s: float) -> Answers:
        """As `ask`, for a GET."""
        return await self._each(workers, lambda url: self.calls.get(url + path, timeout_s))

    async def learn_ranks(self, worker: Worker, timeout_s: float) -> None:
        """Notes how many processes of the worker join a weight group; one where it has nothing to say of that.

        Raises:
            EngineError: it does not answer within `timeout_s` seconds.
        """
        try:
            info = await self.calls.get(f"{worker.url}/server_info", timeout_s)
        except EngineRefused:
            return
        worker.ranks = int(info.get("tp_size") or 1)

    async def _each(self, workers: Sequence[Worker], call: Callable[[str], Awaitable[Mapping[str, Any]]]) -> Answers:
        async def one(url: str) -> Mapping[str, Any] | EngineError:
            try:
                return await call(url)
            except EngineError as error:
                return error

        said = await asyncio.gather(*(one(worker.url) for worker in workers))
        pairs = [(worker.url, answer) for worker, answer in zip(workers, said, strict=True)]
        return Answers(
            ok={url: answer for url, answer in pairs if not isinstance(answer, EngineError)},
            failed={url: answer for url, answer in pairs if isinstance(answer, EngineError)},
        )

    # Who may have requests.

    async def quarantine(self, worker: Worker, why: str, *, heals: bool = False) -> None:
        """See `Fleet`. `heals`: it is only out of reach, its weights are as they were; it may serve again as soon as it answers."""
        known = self._workers[worker.url]
        if not heals:
            self._tainted.add(known.url)
        if known.state is WorkerState.QUARANTINED:
            known.why = why
            return
        known.state, known.why = WorkerState.QUARANTINED, why
        self.quarantines += 1
        log.warning("worker %s is quarantined: %s", known.url, why)
        if self.router is None or (heals and not self.serving()):
            return  # a request that waits for the only worker is better off than one that is refused
        try:
            await self.router.remove(known.url)
        except EngineError as error:
            log.warning("worker %s is still in the router's list: %s", known.url, error)
        await self._take_off(known)

    async def _take_off(self, worker: Worker) -> None:
        """Aborts its requests; each goes on elsewhere from what it has."""
        answers = await self.ask([worker], "/abort_request", {"abort_all": True}, timeout_s=self.alive_s)
        for error in answers.failed.values():
            # One whose process is gone broke the connections of its requests itself.
            self.stranded |= not isinstance(error, WorkerDown)

    async def admit(self, worker: Worker, version: int) -> None:
        """See `Fleet`."""
        known = self._workers[worker.url]
        known.version = version
        self._tainted.discard(known.url)
        if known.state is WorkerState.SERVING:
            return
        known.state, known.why = WorkerState.SERVING, ""
        log.warning("worker %s serves with version %d", known.url, version)
        if self.router is not None:
            try:
                await self.router.add(known.url)
            except EngineError as error:
                log.warning("worker %s is not yet in the router's list: %s", known.url, error)

    def in_force(self, weights: Weights) -> None:
        """See `Fleet`."""
        self.wanted = weights
        self.era += 1
        for worker in self.serving():
            worker.version = weights.version

    # Sudden faults.

    async def suspect(self) -> None:
        """A request lost its connection: asks every serving worker whether it lives, and returns once the dead and frozen ones are out of
        routing. Requests that ask at the same time share one look."""
        if self._suspecting is None or self._suspecting.done():
            self._suspecting = asyncio.create_task(self._look_around())
        await asyncio.shield(self._suspecting)

    async def _look_around(self) -> None:
        await asyncio.gather(*(self._look_at(worker) for worker in self.serving()))

    async def _look_at(self, worker: Worker) -> None:
        try:
            await self.calls.get(f"{worker.url}/model_info", self.alive_s)
        except EngineError as error:
            if (why := out_of_reach(error)) is not None and not (self.updating and isinstance(error, WorkerSilent)):
                await self.quarantine(worker, why, heals=True)


def out_of_reach(error: EngineError) -> str | None:
    """Why a worker that gave this error to a GET of /model_info cannot have requests; None where it answered."""
    if isinstance(error, WorkerSilent):
        return f"does not answer ({error})"
    return f"cannot be reached ({error})" if isinstance(error, WorkerDown) else None
