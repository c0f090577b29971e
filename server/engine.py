"""The one client of an engine: token ids in, token ids and logprobs out, over SGLang's native HTTP surface.

In: prompt ids and sampling. Out: a `Completion` whose resumed parts are joined, with the policy version of every token. It waits for the
engine, never longer than its deadline: refusals (400) are raised at once, faults are retried with back-off, and an aborted request goes on
with `prompt + partial` unless the caller itself asked for the abort. The wire word `weight_version` becomes an int here and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import orjson

from palestra.server.signal import Signal
from palestra.server.types import I16, Completion, EngineError, EngineRefused, VersionSpan

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    weight_version: str | int
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_versions: list[_Span] = []
    cached_tokens: int = 0
    routed_experts: str | None = None
    routed_experts_shape: list[int] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


_decode = msgspec.json.Decoder(_Generated).decode


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """What one request asks of the engine."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    routed_experts: bool = False
    forced_ids: tuple[int, ...] = ()
    """A test's wish: sample these ids, with their real logprobs. Engines refuse it unless they were started for it."""


def version_of(wire: str | int) -> int:
    """The policy version behind an engine's `weight_version`; a fresh engine's "default" is version 0.

    Raises:
        EngineError: it is no number.
    """
    if wire == "default":
        return 0
    try:
        return int(wire)
    except ValueError:
        raise EngineError(f"the engine reports weight_version {wire!r}, which is no policy version") from None


class EngineClient:
    """Generation through `url`; control calls go to each of `workers`."""

    def __init__(
        self, url: str, workers: Sequence[str] = (), *, deadline_s: float = 600.0, retry_s: float = 30.0
    ) -> None:
        self.url = url.rstrip("/")
        self.workers = tuple(w.rstrip("/") for w in workers) or (self.url,)
        self.deadline_s = deadline_s
        self.retry_s = retry_s
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

    async def generate(self, prompt: Sequence[int], sampling: EngineSampling, *, rid: str, key: str) -> Completion:
        """Samples one completion; `key` keeps a session (or a group) on one worker.

        Raises:
            EngineRefused: the request itself is wrong.
            EngineError: no answer within the deadline.
        """
        self.running += 1
        try:
            return await self._generate(prompt, sampling, rid, key)
        finally:
            self.running -= 1
            self._cancelled.discard(rid)

    async def _generate(self, prompt: Sequence[int], sampling: EngineSampling, rid: str, key: str) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        cached, part = -1, 0
        deadline = time.monotonic() + self.deadline_s
        while True:
            left = sampling.max_new_tokens - len(ids)
            part_rid = rid if part == 0 else f"{rid[:-4]}{part:04x}"
            body = _request([*prompt, *ids], sampling, part_rid, left, len(ids))
            meta = await self._post_generate(body, key, deadline)
            _check(meta)
            if any(not (isinstance(lp, float) and np.isfinite(lp)) for lp, _, _ in meta.output_token_logprobs):
                raise EngineError(f"the engine returned a logprob that is not finite for {part_rid}")
            for span in meta.weight_versions or [_Span(meta.weight_version, 0, meta.completion_tokens)]:
                _append_span(spans, version_of(span.version), len(ids) + span.start, len(ids) + span.end)
            logprobs += [lp for lp, _, _ in meta.output_token_logprobs]
            ids += [token for _, token, _ in meta.output_token_logprobs]
            cached = meta.cached_tokens if cached < 0 else cached
            reason = str(meta.finish_reason.get("type", "stop"))
            if reason != "abort" or rid in self._cancelled:
                return Completion(tuple(ids), tuple(logprobs), reason, tuple(spans), cached, _experts(meta))
            if len(ids) >= sampling.max_new_tokens:
                return Completion(tuple(ids), tuple(logprobs), "length", tuple(spans), cached, _experts(meta))
            if time.monotonic() > deadline:
                raise EngineError(f"request {rid} was aborted {part + 1} times and its deadline is over")
            part += 1

    async def _post_generate(self, body: bytes, key: str, deadline: float) -> _Meta:
        try:
            await asyncio.wait_for(self.gate.wait(), max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            raise EngineError("a weight publish held the request back past its deadline") from None
        self.on_wire += 1
        try:
            raw = await self._post(f"{self.url}/generate", body, {"X-SMG-Routing-Key": key}, deadline)
        finally:
            self.on_wire -= 1
            self.idle.notify()
        try:
            return _decode(raw).meta_info
        except msgspec.DecodeError as error:
            raise EngineError(f"the engine's answer to /generate is not understood: {error}") from None

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
        """Ends a running request; `generate` returns what it has, with finish_reason abort."""
        self._cancelled.add(rid)
        await self.control("/abort_request", {"rid": rid})

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
        done = await self.generate(prompt, sampling, rid="0" * 32, key="probe")
        (info, *_) = await self.info()
        vocab = int(info.get("vocab_size", 0))
        uniform = -np.log(vocab) if vocab else None
        if uniform is not None and all(abs(lp - uniform) < 1e-4 for lp in done.logprobs):
            raise EngineError("the engine's logprobs are uniform: its output layer was not loaded (tied embeddings?)")


def _request(ids: list[int], sampling: EngineSampling, rid: str, left: int, done: int) -> bytes:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": left,
        "stop_token_ids": list(sampling.stop_token_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {"input_ids": ids, "rid": rid, "return_logprob": True, "sampling_params": params}
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    if forced := sampling.forced_ids[done:]:
        body["forced_ids"] = list(forced)
    return orjson.dumps(body)


def _check(meta: _Meta) -> None:
    if len(meta.output_token_logprobs) != meta.completion_tokens:
        raise EngineError(
            f"the engine says {meta.completion_tokens} tokens but gives {len(meta.output_token_logprobs)} ids with logprobs"
        )


def _append_span(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    if start == end:
        return
    if spans and spans[-1].version == version and spans[-1].end == start:
        spans[-1] = VersionSpan(version, spans[-1].start, end)
    else:
        spans.append(VersionSpan(version, start, end))


def _experts(meta: _Meta) -> I16 | None:
    if meta.routed_experts is None:
        return None
    if meta.routed_experts_shape is None:
        raise EngineError("the engine gives routed experts without their shape: its element type is not known")
    return np.frombuffer(base64.b64decode(meta.routed_experts), dtype=np.int16).reshape(meta.routed_experts_shape)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError:
        return {"text": raw[:200].decode(errors="replace")}
    return value if isinstance(value, dict) else {"value": value}
