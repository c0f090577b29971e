"""The engines' wire, SGLang's /generate: what a request says, and a completion put together from the answers to its parts.

In: sampling wishes and prompts; answers as bytes. Out: request bodies; a `Completion` with ids, logprobs and the policy version of every
token. The wire word `weight_version` becomes an int here and nowhere else. Pure; nothing waits.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from palestra.server.types import I16, Completion, EngineError, VersionSpan


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class Meta(msgspec.Struct):
    """`meta_info` of an answer."""

    finish_reason: dict[str, Any]
    completion_tokens: int
    weight_version: str | int
    output_token_logprobs: list[tuple[float, int, Any]]
    prompt_tokens: int = 0
    """0: not said. SGLang leaves it out of the answer to a request that was aborted while it waited for its place."""
    weight_versions: list[_Span] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    cached_tokens: int = 0
    num_retractions: int | None = None
    """How often the request lost its place for want of room, or to a weight update."""
    queue_time: float | None = None
    """How long it waited for its place, seconds."""
    routed_experts: str | None = None
    routed_experts_shape: list[int] | None = None


class _Generated(msgspec.Struct):
    meta_info: Meta


_decode = msgspec.json.Decoder(_Generated).decode


def read_answer(raw: bytes) -> Meta:
    """The answer to /generate.

    Raises:
        EngineError: it is not understood.
    """
    try:
        return _decode(raw).meta_info
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine's answer to /generate is not understood: {error}") from None


_IDS = 2**31
"""Ids are below it, whatever the vocabulary."""
_PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters that are only sent where they differ from this."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it goes over the wire: its ids as the inside of a JSON array. Long ones are only ever appended to."""

    json: bytes
    length: int
    """Ids."""

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        """From ids."""
        return cls(orjson.dumps(list(ids))[1:-1], len(ids))

    def extended(self, ids: Sequence[int]) -> Prompt:
        """With more ids behind it."""
        return Prompt(self.and_then(ids), self.length + len(ids))

    def and_then(self, ids: Sequence[int]) -> bytes:
        """The JSON with more ids behind it."""
        if not ids:
            return self.json
        more = orjson.dumps(list(ids))[1:-1]
        return b",".join((self.json, more)) if self.json else more


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """What one request asks of the engine."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the reply; they are sampled and stay in the ids."""
    top_logprobs: int = 0
    """Likeliest tokens to report at every place."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[str, float], ...] = ()
    """(token id as text, what is added to its logit)."""
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
        version = int(wire)
    except ValueError:
        version = -1
    if not 0 <= version < 2**62:
        raise EngineError(f"the engine reports weight_version {wire!r}, which is no policy version")
    return version


def request_body(
    ids: bytes, sampling: EngineSampling, rid: str, left: int, done: int, salt: str | None = None
) -> bytes:
    """The body of one part: the prompt's ids as JSON, `left` tokens to go after `done` ones. Only requests of one `salt` share a cache."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": left,
        "stop_token_ids": list(sampling.stop_token_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    for name, default in _PLAIN.items():
        if (value := getattr(sampling, name)) != default:
            params[name] = value
    if sampling.logit_bias:
        params["logit_bias"] = dict(sampling.logit_bias)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        # The same for every part: engines mix in the position, so that a part that goes on draws what it would have drawn.
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {"rid": rid, "return_logprob": True, "sampling_params": params}
    if salt is not None:
        body["extra_key"] = salt
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    if forced := sampling.forced_ids[done:]:
        body["forced_ids"] = list(forced)
    return b"".join((b'{"input_ids":[', ids, b"],", orjson.dumps(body)[1:]))


class Joined:
    """The parts of one completion, put together as they come."""

    def __init__(self, experts: tuple[int, int] | None = None) -> None:
        """`experts`: the model's layers and experts per token, for engines that report experts without a shape."""
        self.experts = experts
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.top: list[tuple[tuple[float, int], ...]] = []

    def add(self, meta: Meta, rid: str) -> None:
        """Raises:
        EngineError: lengths, logprobs or versions that break the contract.
        """
        _check(meta)
        start = len(self.ids)
        for logprob, token, _ in meta.output_token_logprobs:
            if not (isinstance(logprob, float) and math.isfinite(logprob)):
                raise EngineError(f"the engine returned a logprob that is not finite for {rid}")
            if not 0 <= token < _IDS:
                raise EngineError(f"the engine returned {token} for {rid}, which is no id")
            self.logprobs.append(logprob)
            self.ids.append(token)
        for span in meta.weight_versions or [_Span(meta.weight_version, 0, meta.completion_tokens)]:
            _append_span(self.spans, version_of(span.version), start + span.start, start + span.end)
        for place in meta.output_top_logprobs or ():
            self.top.append(tuple((logprob, token) for logprob, token, _ in place or ()))

    def completion(self, reason: str, cached: int, meta: Meta, crossing: tuple[str, int] | None = None) -> Completion:
        """What was gathered; `crossing`: a stop text found by the client, and after how many ids."""
        matched = meta.finish_reason.get("matched")
        stop_text = matched if isinstance(matched, str) and reason == "stop" else None
        kept = len(self.ids)
        if crossing is not None:
            stop_text, kept = crossing
        return Completion(
            tuple(self.ids),
            tuple(self.logprobs),
            reason,
            tuple(self.spans),
            cached,
            _experts(meta, self.experts),
            tuple(self.top),
            stop_text,
            kept,
        )


def stop_across(
    ids: Sequence[int], stop: tuple[str, ...], decode: Callable[[Sequence[int]], str] | None
) -> tuple[str, int] | None:
    """A stop text that an engine could not see, since an abort cut it in two: the text, and how many ids complete it."""
    if not stop or decode is None:
        return None
    text = decode(ids)
    found = min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=None)
    if found is None:
        return None
    low, high = 1, len(ids)
    while low < high:  # the fewest ids whose text holds it
        middle = (low + high) // 2
        low, high = (low, middle) if found[1] in decode(ids[:middle]) else (middle + 1, high)
    return found[1], low


def _check(meta: Meta) -> None:
    at = 0
    for span in meta.weight_versions:
        if span.start != at or span.end < span.start:
            raise EngineError(f"the engine's version spans {_said(meta)} do not follow each other from 0")
        at = span.end
    if meta.weight_versions and at != meta.completion_tokens:
        raise EngineError(f"the engine's version spans {_said(meta)} do not cover its {meta.completion_tokens} tokens")
    if meta.output_top_logprobs is not None and len(meta.output_top_logprobs) != meta.completion_tokens:
        raise EngineError(
            f"the engine gives alternatives for {len(meta.output_top_logprobs)} of {meta.completion_tokens} tokens"
        )
    if len(meta.output_token_logprobs) != meta.completion_tokens:
        raise EngineError(
            f"the engine says {meta.completion_tokens} tokens but gives {len(meta.output_token_logprobs)} ids with logprobs"
        )


def _said(meta: Meta) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in meta.weight_versions]


def _append_span(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    if start == end:
        return
    if spans and spans[-1].version == version and spans[-1].end == start:
        spans[-1] = VersionSpan(version, spans[-1].start, end)
    else:
        spans.append(VersionSpan(version, start, end))


def _experts(meta: Meta, model: tuple[int, int] | None) -> I16 | None:
    """[tokens, layers, topk]. The embedded engine gives int16 and the shape; SGLang int32 of all layers, without a word of the shape."""
    if meta.routed_experts is None:
        return None
    shape, kind = meta.routed_experts_shape, "<i2"
    if shape is None:
        if model is None:
            raise EngineError("the engine gives routed experts without their shape, and the model's is not known")
        shape, kind = [-1, *model], "<i4"
    try:
        flat = np.frombuffer(base64.b64decode(meta.routed_experts), dtype=kind)
        rows = flat.reshape(shape).astype(np.int16, copy=False)
    except (ValueError, TypeError) as error:
        raise EngineError(f"the engine's routed experts are not understood: {error}") from None
    if len(rows) != (wanted := meta.prompt_tokens + meta.completion_tokens - 1):
        raise EngineError(f"the engine gives routed experts of {len(rows)} tokens, not of {wanted}")
    return rows
