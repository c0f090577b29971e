"""The one client of the engines: token ids in, token ids and logprobs out, over SGLang's native HTTP surface.

In: prompt ids and sampling. Out: a `Completion` whose resumed parts are joined, with the policy version of every token. It waits for the
engines, never longer than its deadline: refusals (400) are raised at once, faults are retried with back-off, a worker that died costs the
part that it was sampling, and an aborted request goes on with `prompt + partial` unless the caller itself asked for the abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from palestra.server.busy import BusyClock
from palestra.server.engine_wire import EngineSampling, Joined, Meta, Prompt, read_answer, request_body, stop_across
from palestra.server.gate import Gate
from palestra.server.signal import Signal
from palestra.server.types import Completion, EngineError
from palestra.server.workers.calls import Calls
from palestra.server.workers.figures import PrefixFigures
from palestra.server.workers.mend import Mender
from palestra.server.workers.pins import Pins, saturated
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.report import Report
from palestra.server.workers.retries import BackOff, Setback, failure, given_up
from palestra.server.workers.start import take_up
from palestra.server.workers.table import WorkerTable
from palestra.server.workers.types import Answers, EnginePlace
from palestra.server.workers.watch import Watcher

IDLE_S = 4.0
"""How long an unused connection is kept: less than engines do (5 s), or a request could be sent into one that is being closed."""


class EngineClient:
    """Generation through the router of `place`, or its only engine; control calls go to each worker of `fleet`."""

    def __init__(
        self,
        place: EnginePlace | str,
        *,
        deadline_s: float = 600.0,
        retry_s: float = 30.0,
        decode: Callable[[Sequence[int]], str] | None = None,
        places: int = 64,
    ) -> None:
        """`place`: a text is the URL of one engine; `retry_s`: how long attempts of one request may fail in a row; `decode`: ids to text,
        needed to find stop texts that an abort cut in two; `places`: requests that all engines together decode at a time."""
        place = EnginePlace(place) if isinstance(place, str) else place
        self.url = place.url.rstrip("/")
        self.deadline_s, self.retry_s, self.decode = deadline_s, retry_s, decode
        tokens = dict.fromkeys(place.agents.values(), place.agent_token) if place.agent_token else {}
        self._calls = Calls(tokens)
        self.fleet = WorkerTable(place, self._calls)
        """The workers: who serves, who is quarantined and why."""
        self.figures = PrefixFigures()
        self.pins = Pins()
        self._mender = Mender(self.fleet, deadline_s)
        self.watcher = Watcher(self.fleet, self.figures, self._mender, self._displace)
        self._report = Report(self.fleet, self.figures, self.watcher)
        self.salt: str | None = None
        """Goes into the cache key of every request, so that what was computed under another one is not reused; None: nothing does."""
        self.running = 0
        """Completions that callers wait for."""
        self.busy = BusyClock(places)
        """How much engines have to do."""
        self.faults = 0
        """Attempts that failed through no fault of the request."""
        self.retries = 0
        """Attempts that were made after one that failed."""
        self.gate = Gate()
        """Closed while a publish in `finish` mode, or a freeze, holds requests back."""
        self.idle = Signal()
        """Notified whenever a request leaves an engine."""
        self._cancelled: set[str] = set()
        self._parts: dict[str, str] = {}
        """Request -> the name under which its present part runs at the engine."""
        self._flying: dict[str, asyncio.Timeout] = {}
        """Part on the wire -> its time limit."""
        self._experts: tuple[int, int] | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def on_wire(self) -> int:
        """Requests that an engine has now; those held back by the gate, or waiting for another attempt, are not among them."""
        return self.busy.now

    @property
    def workers(self) -> tuple[str, ...]:
        """URLs that control calls go to."""
        return tuple(worker.url for worker in self.fleet.reachable())

    async def open(self) -> None:
        """Opens the connections on the running loop, and learns from the router which workers there are where nobody said so.

        Raises:
            EngineError: the router names none.
        """
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=IDLE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        await self._calls.open()
        await self.fleet.open()

    async def start(self, facts: ModelFacts) -> None:
        """Refuses engines that would corrupt training, lets all others go on, and begins to watch them.

        Raises:
            EngineError: no engine answers, or one is unfit: which, why, and what to do.
        """
        self._mender.facts, self._experts = facts, facts.experts
        await take_up(self.fleet, facts)
        self.watcher.start()

    async def close(self) -> None:
        """Stops watching and closes the connections."""
        await self.watcher.close()
        self.fleet.close()
        await self._calls.close()
        if self._http is not None:
            await self._http.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: EngineSampling,
        *,
        rid: str,
        key: str,
        deadline_s: float | None = None,
        later: bool = False,
    ) -> Completion:
        """Samples one completion; `key`, the group, keeps all its requests on one worker while that has room. `deadline_s`: less time than
        the client's own. `later`: the prompt goes on from an earlier turn (for the figures alone).

        Raises:
            EngineRefused: the request itself is wrong.
            EngineError: no answer within the deadline.
        """
        self.running += 1
        seconds = min(self.deadline_s, deadline_s or self.deadline_s)
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            return await self._generate(prompt, sampling, rid, key, deadline, later)
        finally:
            self.running -= 1
            self._cancelled.discard(rid)
            self._parts.pop(rid, None)

    async def _generate(
        self, prompt: Prompt, sampling: EngineSampling, rid: str, group: str, deadline: float, later: bool
    ) -> Completion:
        loop = asyncio.get_running_loop()
        began = loop.time()
        joined, meta, cached, part, resumed = Joined(self._experts), None, -1, 0, False
        back_off: BackOff | None = None
        while True:
            left = sampling.max_new_tokens - len(joined.ids)
            # Each attempt has a name of its own: the engine may still know the one that was lost.
            name = self._parts[rid] = rid if part == 0 else f"{rid[:-4]}{part:04x}"
            part += 1
            body = request_body(prompt.and_then(joined.ids), sampling, name, left, len(joined.ids), self.salt)
            await self._admitted(began, deadline)
            if rid in self._cancelled:
                if meta is None:
                    raise EngineError(f"request {rid} was ended before it began")
                return joined.completion("abort", cached, meta)
            try:
                meta = await self._attempt(body, name, group, deadline)
            except Setback as setback:
                self.faults += 1
                back_off = back_off or BackOff(self.retry_s)
                await self._before_next(back_off, setback, deadline)
                continue
            back_off = None
            joined.add(meta, name)
            if cached < 0 and meta.prompt_tokens:
                cached = meta.cached_tokens
                self.figures.add(group, meta.prompt_tokens, cached, later=later)
            reason = str(meta.finish_reason.get("type", "stop"))
            if resumed and (crossing := stop_across(joined.ids, sampling.stop, self.decode)) is not None:
                return joined.completion("stop", cached, meta, crossing)
            if reason != "abort" or rid in self._cancelled:
                return joined.completion(reason, cached, meta)
            if left <= meta.completion_tokens:
                return joined.completion("length", cached, meta)
            if loop.time() > deadline:
                raise EngineError(
                    f"request {rid} was aborted and its deadline is over; {len(joined.ids)} tokens are lost"
                )
            resumed = True

    async def _before_next(self, back_off: BackOff, setback: Setback, deadline: float) -> None:
        """Waits as long as the next attempt has to wait; after a broken connection, until the dead are out of routing.

        Raises:
            EngineError: there is no next attempt.
        """
        if setback.broken:
            await self.fleet.suspect()
        delay = back_off.next_delay(setback, asyncio.get_running_loop().time(), deadline)
        self.retries += 1
        if delay:
            await asyncio.sleep(delay)

    async def freeze(self) -> None:
        """Takes every request off the engines: what they sampled is kept, and new ones wait, until `thaw`.

        Raises:
            EngineError: a worker did not obey; nothing is held back then.
        """
        self.gate.clear()
        try:
            await self.control("/abort_request", {"abort_all": True})
        except EngineError:
            self.gate.set()
            raise

    def thaw(self) -> None:
        """Lets requests go on, from prompt and partial completion, with what was left of their budget."""
        self.gate.set()

    async def _admitted(self, began: float, deadline: float) -> None:
        """Until nothing holds requests back; those that began first go first."""
        if self.gate.is_set():
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self.gate.wait(began)
        except TimeoutError:
            raise EngineError("a weight publish, or a freeze, held the request back past its deadline") from None

    async def _attempt(self, body: bytes, name: str, group: str, deadline: float) -> Meta:
        """One part of a request.

        Raises:
            Setback: it failed through no fault of its own.
            EngineRefused: the request is wrong.
            EngineError: the answer breaks the contract, or the deadline is over.
        """
        key, era = self.pins.key(group), self.fleet.era
        meta = read_answer(await self._post(body, name, key, deadline))
        # An update takes every request out of its place: what happened in one says nothing of a worker's room.
        quiet = era == self.fleet.era and not self.fleet.updating
        if quiet and saturated(meta.num_retractions, meta.queue_time) and self.watcher.room_elsewhere:
            self.pins.move(group, key)
        return meta

    async def _post(self, body: bytes, name: str, key: str, deadline: float) -> bytes:
        if self._http is None:
            raise EngineError("the engine client is not open")
        url = f"{self.url}/generate"
        headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": key}
        begun = asyncio.get_running_loop().time()
        self.busy.change(1)
        try:
            async with asyncio.timeout_at(deadline) as self._flying[name]:
                async with self._http.post(url, data=body, headers=headers) as reply:
                    raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            setback = Setback(f"{url}: {type(error).__name__}: {error}", broken=True)
            if (now := asyncio.get_running_loop().time()) >= deadline:
                raise given_up(setback, now - begun) from None
            raise setback from None
        finally:
            self._flying.pop(name, None)
            self.busy.change(-1)
            self.idle.notify()
        if reply.status == 200:
            return raw
        raise failure(url, reply.status, reply.headers.get("Retry-After"), raw)

    async def _displace(self) -> None:
        """Takes requests off workers that do not answer. Nobody knows which they have; so all others give theirs back, with what was
        sampled, and what is not back then is begun anew elsewhere."""
        before = dict(self._flying)
        if not before or not (serving := self.fleet.serving()):
            return
        await self.fleet.ask(serving, "/abort_request", {"abort_all": True}, timeout_s=self.fleet.alive_s)
        loop = asyncio.get_running_loop()
        end = loop.time() + self.fleet.alive_s
        while any(self._flying.get(name) is limit for name, limit in before.items()) and loop.time() < end:
            await self.idle.wait(end - loop.time())
        for name, limit in before.items():
            if self._flying.get(name) is limit:
                limit.reschedule(loop.time())

    async def cancel(self, rid: str) -> None:
        """Ends a running request; `generate` returns what it has, with finish_reason abort. One that has ended is left alone.

        Raises:
            EngineError: no worker could be told.
        """
        if (part_rid := self._parts.get(rid)) is not None:
            self._cancelled.add(rid)
            answers = await self.fleet.ask(self.fleet.reachable(), "/abort_request", {"rid": part_rid}, timeout_s=30.0)
            if not answers.ok:
                raise next(iter(answers.failed.values()))

    async def control(self, path: str, payload: dict[str, Any], *, timeout_s: float = 120.0) -> list[Mapping[str, Any]]:
        """One control call to every worker at once; the answers in the workers' order.

        Raises:
            EngineError: one of them failed; the message names it.
        """
        return _all_of(await self.fleet.ask(self.fleet.reachable(), path, payload, timeout_s=timeout_s))

    async def info(self) -> list[Mapping[str, Any]]:
        """`/model_info` of every worker.

        Raises:
            EngineError: one of them does not answer.
        """
        return _all_of(await self.fleet.look(self.fleet.reachable(), "/model_info", timeout_s=30.0))

    def metrics(self) -> dict[str, float]:
        """Figures of the engines since the last call."""
        return self._report.take({"faults": self.faults, "retries": self.retries, "unpins": self.pins.moved})

    def status(self) -> list[dict[str, Any]]:
        """One row per worker."""
        return self._report.rows()


def _all_of(answers: Answers) -> list[Mapping[str, Any]]:
    for error in answers.failed.values():
        raise error
    return list(answers.ok.values())
