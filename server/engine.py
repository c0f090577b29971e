"""The one client of an engine: token ids in, token ids and logprobs out, over SGLang's native HTTP surface.

In: prompt ids and sampling. Out: a `Completion` whose resumed parts are joined, with the policy version of every token. It waits for the
engine, never longer than its deadline: refusals (400) are raised at once, faults are retried with back-off, and an aborted request goes on
with `prompt + partial` unless the caller itself asked for the abort.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from palestra.server.engine_wire import (
    EngineSampling,
    Joined,
    Meta,
    Prompt,
    read_answer,
    request_body,
)
from palestra.server.signal import Signal
from palestra.server.types import Completion, EngineError, EngineRefused

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


class EngineClient:
    """Generation through `url`; control calls go to each of `workers`."""

    def __init__(
        self,
        url: str,
        workers: Sequence[str] = (),
        *,
        deadline_s: float = 600.0,
        retry_s: float = 30.0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.workers = tuple(w.rstrip("/") for w in workers) or (self.url,)
        self.deadline_s = deadline_s
        self.retry_s = retry_s
        self.decode = decode
        """Ids to text: needed to find stop texts that an abort cut in two."""
        """How long an engine may be unreachable before a request gives up."""
        self.running = 0
        """Completions that callers wait for."""
        self.on_wire = 0
        """Requests that an engine has now; those held back by the gate are not among them."""
        self.faults = 0
        self.gate = asyncio.Event()
        """Cleared while a publish in `finish` mode holds new requests back."""
        self.gate.set()
        self.idle = Signal()
        """Notified whenever a request leaves an engine."""
        self._cancelled: set[str] = set()
        self._parts: dict[str, str] = {}
        """Request -> the name under which its present part runs at the engine."""
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Opens the connection pool on the running loop."""
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
        timeout = aiohttp.ClientTimeout(total=self.deadline_s, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        """Closes the connection pool."""
        if self._http is not None:
            await self._http.close()

    async def generate(
        self, prompt: Prompt, sampling: EngineSampling, *, rid: str, key: str, deadline_s: float | None = None
    ) -> Completion:
        """Samples one completion; `key` keeps a session (or a group) on one worker. `deadline_s`: less time than the client's own.

        Raises:
            EngineRefused: the request itself is wrong.
            EngineError: no answer within the deadline.
        """
        self.running += 1
        try:
            return await self._generate(prompt, sampling, rid, key, min(self.deadline_s, deadline_s or self.deadline_s))
        finally:
            self.running -= 1
            self._cancelled.discard(rid)
            self._parts.pop(rid, None)

    async def _generate(
        self, prompt: Prompt, sampling: EngineSampling, rid: str, key: str, deadline_s: float
    ) -> Completion:
        joined = Joined()
        meta: Meta | None = None
        cached, part = -1, 0
        deadline = time.monotonic() + deadline_s
        while True:
            left = sampling.max_new_tokens - len(joined.ids)
            part_rid = self._parts[rid] = rid if part == 0 else f"{rid[:-4]}{part:04x}"
            body = request_body(prompt.and_then(joined.ids), sampling, part_rid, left, len(joined.ids))
            await self._admitted(deadline)
            if rid in self._cancelled:
                if meta is None:
                    raise EngineError(f"request {rid} was ended before it began")
                return joined.completion("abort", cached, meta)
            meta = await self._post_generate(body, key, deadline)
            joined.add(meta, part_rid)
            cached = meta.cached_tokens if cached < 0 else cached
            reason = str(meta.finish_reason.get("type", "stop"))
            if part and (crossing := self._stop_across(joined.ids, sampling.stop)) is not None:
                return joined.completion("stop", cached, meta, crossing)
            if reason != "abort" or rid in self._cancelled:
                return joined.completion(reason, cached, meta)
            if left <= meta.completion_tokens:
                return joined.completion("length", cached, meta)
            if time.monotonic() > deadline:
                raise EngineError(f"request {rid} was aborted {part + 1} times and its deadline is over")
            part += 1

    def _stop_across(self, ids: Sequence[int], stop: tuple[str, ...]) -> tuple[str, int] | None:
        """A stop text that an engine could not see, since an abort cut it in two: the text, and how many ids complete it."""
        if not stop or self.decode is None:
            return None
        text = self.decode(ids)
        found = min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=None)
        if found is None:
            return None
        low, high = 1, len(ids)
        while low < high:  # the fewest ids whose text holds it
            middle = (low + high) // 2
            low, high = (low, middle) if found[1] in self.decode(ids[:middle]) else (middle + 1, high)
        return found[1], low

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

    async def _admitted(self, deadline: float) -> None:
        """Until no publish holds requests back."""
        if self.gate.is_set():
            return
        try:
            await asyncio.wait_for(self.gate.wait(), max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise EngineError("a weight publish held the request back past its deadline") from None

    async def _post_generate(self, body: bytes, key: str, deadline: float) -> Meta:
        self.on_wire += 1
        try:
            raw = await self._post(f"{self.url}/generate", body, {"X-SMG-Routing-Key": key}, deadline)
        finally:
            self.on_wire -= 1
            self.idle.notify()
        return read_answer(raw)

    async def _post(self, url: str, body: bytes, headers: dict[str, str], deadline: float) -> bytes:
        """POST with retries of faults. 400 is the request's own fault and never repeated."""
        if self._http is None:
            raise EngineError("the engine client is not open")
        delay, failing_since, last = 0.1, 0.0, ""
        while True:
            try:
                async with self._http.post(
                    url, data=body, headers={"Content-Type": "application/json", **headers}
                ) as reply:
                    raw = await reply.read()
                    if reply.status == 200:
                        return raw
                    last = f"HTTP {reply.status}: {raw[:500].decode(errors='replace')}"
                    if reply.status not in RETRIED:
                        raise EngineRefused(f"{url}: {last}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                last = f"{type(error).__name__}: {error}"
            self.faults += 1
            now = time.monotonic()
            failing_since = failing_since or now
            if now - failing_since > self.retry_s or now + delay > deadline:
                raise EngineError(f"{url} did not answer for {now - failing_since:.0f} s; last: {last}")
            await asyncio.sleep(delay * (0.5 + random.random()))
            delay = min(delay * 2, 5.0)

    async def cancel(self, rid: str) -> None:
        """Ends a running request; `generate` returns what it has, with finish_reason abort. One that has ended is left alone."""
        if (part_rid := self._parts.get(rid)) is not None:
            self._cancelled.add(rid)
            await self.control("/abort_request", {"rid": part_rid})

    async def control(self, path: str, payload: dict[str, Any], *, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """One control call to every worker at once; the answers in the workers' order.

        Raises:
            EngineError: one of them failed; the message names it.
        """
        body, deadline = orjson.dumps(payload), time.monotonic() + timeout_s
        raws = await asyncio.gather(*(self._post(w + path, body, {}, deadline) for w in self.workers))
        return [_json(raw) for raw in raws]

    async def info(self) -> list[dict[str, Any]]:
        """`/model_info` of every worker.

        Raises:
            EngineError: one of them does not answer.
        """
        if self._http is None:
            raise EngineError("the engine client is not open")
        out = []
        for worker in self.workers:
            try:
                async with self._http.get(f"{worker}/model_info", timeout=aiohttp.ClientTimeout(total=30)) as reply:
                    out.append(_json(await reply.read()))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineError(f"{worker}/model_info: {type(error).__name__}: {error}") from None
        return out

    async def probe(self, prompt: Sequence[int], stop_ids: Sequence[int]) -> None:
        """Refuses an engine that would corrupt training: ids and logprobs must come back, in equal number, and not be uniform.

        Raises:
            EngineError: what is wrong with it.
        """
        sampling = EngineSampling(1.0, 4, tuple(stop_ids))
        done = await self.generate(Prompt.of(prompt), sampling, rid="0" * 32, key="probe")
        (info, *_) = await self.info()
        vocab = int(info.get("vocab_size", 0))
        uniform = -np.log(vocab) if vocab else None
        if uniform is not None and all(abs(lp - uniform) < 1e-4 for lp in done.logprobs):
            raise EngineError("the engine's logprobs are uniform: its output layer was not loaded (tied embeddings?)")


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError:
        return {"text": raw[:200].decode(errors="replace")}
    return value if isinstance(value, dict) else {"value": value}
