"""A `Turn` as the columns of one row, and back. Arrays are little-endian bytes; nothing is waited for.

In: a turn of the recorder, checked here for what no later reader could repair. Out: a tuple in the order of
`COLUMNS`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from palestra.server.store.jsonbytes import dumps, loads
from palestra.server.types import I16, SampleError, Turn, VersionSpan

COLUMNS = (
    "idx, parent, tokens, delivered, close_tokens, cached_tokens, temperature, finish_reason, fork_reason, at, prompt, "
    "completion, logprobs, spans, messages, experts_shape, experts, extra"
)
_EXTRA = {"tools": "", "opened": 0, "ill_formed": None}
"""Fields that few turns have, in one column, and what they are where it says nothing."""


_I2, _I4, _F4 = np.dtype("<i2"), np.dtype("<i4"), np.dtype("<f4")


def check_turn(turn: Turn) -> None:
    """Raises:
    SampleError: ids and logprobs differ in number, or the spans do not cover the completion in order.
    """
    n = len(turn.completion_ids)
    if len(turn.logprobs) != n:
        raise SampleError(f"turn {turn.index}: {n} completion ids but {len(turn.logprobs)} logprobs")
    if turn.parent is not None and not 0 <= turn.parent < turn.index:
        raise SampleError(f"turn {turn.index}: its parent is {turn.parent}, which is no earlier turn")
    if not 0 <= turn.close_tokens <= len(turn.prompt_delta):
        raise SampleError(f"turn {turn.index}: {turn.close_tokens} close tokens in a delta of {len(turn.prompt_delta)}")
    at = 0
    for span in turn.spans:
        if span.start != at or span.end < span.start or span.version < 0:
            raise SampleError(f"turn {turn.index}: version spans {list(turn.spans)} do not follow each other from 0")
        at = span.end
    if at != n:
        raise SampleError(f"turn {turn.index}: version spans end at {at}, the completion has {n} tokens")


def turn_values(turn: Turn, at: float) -> tuple[Any, ...]:
    """The row of a turn that came at `at` (Unix seconds)."""
    experts = turn.routed_experts
    return (
        turn.index,
        turn.parent,
        len(turn.completion_ids),
        int(turn.delivered),
        turn.close_tokens,
        turn.cached_tokens,
        turn.temperature,
        turn.finish_reason,
        turn.fork_reason,
        at,
        np.asarray(turn.prompt_delta, _I4).tobytes(),
        np.asarray(turn.completion_ids, _I4).tobytes(),
        np.asarray(turn.logprobs, _F4).tobytes(),
        struct.pack(f"<{3 * len(turn.spans)}q", *(n for s in turn.spans for n in (s.version, s.start, s.end))),
        dumps(turn.messages),
        None if experts is None else ",".join(map(str, experts.shape)),
        None if experts is None else np.asarray(experts, _I2).tobytes(),
        dumps(extra) if (extra := {k: v for k, d in _EXTRA.items() if (v := getattr(turn, k)) != d}) else None,
    )


def turn_of(row: tuple[Any, ...]) -> Turn:
    """The turn that `turn_values` wrote."""
    (index, parent, _, delivered, close, cached, temperature, finish, fork, _, *blobs) = row
    prompt, completion, logprobs, spans, messages, shape, experts, extra = blobs
    return Turn(
        index=index,
        parent=parent,
        prompt_delta=np.frombuffer(prompt, "<i4").astype(np.int32, copy=False),
        close_tokens=close,
        completion_ids=np.frombuffer(completion, "<i4").astype(np.int32, copy=False),
        logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32, copy=False),
        finish_reason=finish,
        spans=tuple(VersionSpan(*map(int, span)) for span in np.frombuffer(spans, "<i8").reshape(-1, 3)),
        temperature=temperature,
        fork_reason=fork,
        cached_tokens=cached,
        delivered=bool(delivered),
        messages=tuple(loads(messages)),
        routed_experts=None if experts is None else _experts(experts, shape),
        **({} if extra is None else loads(extra)),
    )


def _experts(data: bytes, shape: str) -> I16:
    return np.frombuffer(data, "<i2").astype(np.int16, copy=False).reshape([int(n) for n in shape.split(",")])
