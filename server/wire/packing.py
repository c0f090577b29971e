"""The arrays of training rows, packed by structure and spread out again.

Mask, source and the places that have a logprob change seldom along a row, so they travel as runs; logprobs travel only
where there is one. Short rows are worked on together, since calls of numpy, and not its work, are what they cost; long
ones alone, since memory beyond a processor's cache is what those cost. In: rows, or packed arrays. Out: the other. Pure.
Unpacked arrays are read-only views of the bytes that they came from where that is possible, else parts of an array that
rows share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from palestra.server.types import F32, U8, SampleError, TrainingSample

_ALIGN = 8
"""Bytes: where an array may begin."""
_TOGETHER = 16_384
"""Tokens of rows that are worked on together."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The arrays of one row as they are written: little-endian, without gaps."""

    token_ids: NDArray[Any]
    """i4."""
    lengths: NDArray[Any]
    """i4, of runs of tokens of one kind."""
    kinds: NDArray[Any]
    """u2, of each run: source << 2 | mask << 1 | whether there are logprobs."""
    logprobs: NDArray[Any]
    """f4, where there is one."""
    experts: NDArray[Any] | None
    """i2."""

    def parts(self) -> list[memoryview | bytes]:
        """What is written, in that order, each array padded; nothing is copied."""
        found: list[memoryview | bytes] = []
        for array in (self.token_ids, self.lengths, self.kinds, self.logprobs, self.experts):
            if array is not None:
                found.append(array.data)
                if gap := -array.nbytes % _ALIGN:
                    found.append(bytes(gap))
        return found


@dataclass(frozen=True, slots=True)
class SpreadRow:
    """What the runs of a row say of each token."""

    loss_mask: U8
    sources: U8
    logprobs: F32
    """NaN where there is none."""


class Cursor:
    """Takes one array after the other from bytes."""

    def __init__(self, blob: bytes, at: int) -> None:
        self._blob, self._at = blob, at

    def take(self, kind: str, count: int) -> NDArray[Any]:
        """The next `count` items of a dtype.

        Raises:
            ValueError: there are not so many.
        """
        if count < 0:
            raise ValueError(f"an array of {count} items")
        self._at += -self._at % _ALIGN
        array = np.frombuffer(self._blob, kind, count, self._at) if count else np.empty(0, kind)
        self._at += array.nbytes
        return array


def padding(size: int) -> bytes:
    """What is missing behind `size` bytes before the next array may begin."""
    return bytes(-size % _ALIGN)


def pack(samples: Sequence[TrainingSample]) -> list[PackedRow]:
    """The rows of a group, packed.

    Raises:
        SampleError: a mask that is neither 0 nor 1.
    """
    return [arrays for some in _bunches(samples, [len(row.token_ids) for row in samples]) for arrays in _pack(some)]


def _bunches(rows: Sequence[T], lengths: Sequence[int]) -> Iterator[list[T]]:
    """Rows in their order, those together that have no more than _TOGETHER tokens, each one at least alone."""
    held: list[T] = []
    tokens = 0
    for row, length in zip(rows, lengths, strict=True):
        if held and tokens + length > _TOGETHER:
            yield held
            held, tokens = [], 0
        held.append(row)
        tokens += length
    if held:
        yield held


def _pack(samples: Sequence[TrainingSample]) -> list[PackedRow]:
    ends = list(itertools.accumulate(len(row.token_ids) for row in samples))
    sources = np.concatenate([row.sources for row in samples])
    masks = np.concatenate([row.loss_mask for row in samples])
    if masks.max(initial=0) > 1:
        row = next(row for row in samples if row.loss_mask.max(initial=0) > 1)
        raise SampleError(
            f"row {row.rollout_id}/{row.attempt} branch {row.branch}: the loss mask holds more than 0 and 1"
        )
    known = np.empty(ends[-1], bool)
    for row, start, end in zip(samples, [0, *ends], ends, strict=False):
        np.isnan(row.logprobs, out=known[start:end])
    np.logical_not(known, out=known)
    starts = _run_starts((sources, masks, known), ends)
    lengths = np.diff(starts, append=ends[-1]).astype("<i4")
    kinds = (sources[starts].astype("<u2") << 2) | (masks[starts].astype("<u2") << 1) | known[starts]
    first_runs = [0, *np.searchsorted(starts, ends).tolist()]
    return [
        PackedRow(
            token_ids=np.ascontiguousarray(row.token_ids, "<i4"),
            lengths=lengths[first:last],
            kinds=kinds[first:last],
            logprobs=row.logprobs[known[start:end]].astype("<f4", copy=False),
            experts=None if row.routed_experts is None else np.ascontiguousarray(row.routed_experts, "<i2"),
        )
        for row, start, end, first, last in zip(samples, [0, *ends], ends, first_runs, first_runs[1:], strict=False)
    ]


def _run_starts(arrays: Sequence[NDArray[Any]], ends: list[int]) -> NDArray[np.intp]:
    """Where one of the arrays changes, or a row begins; `ends`: of the rows."""
    changes = np.zeros(ends[-1], bool)
    for array in arrays:
        changes[1:] |= array[1:] != array[:-1]
    changes[[0, *ends[:-1]]] = True
    return changes.nonzero()[0]


def unpack(rows: Sequence[PackedRow]) -> list[SpreadRow]:
    """What the runs of a group's rows say.

    Raises:
        ValueError: the runs of a row do not fit its ids and logprobs.
    """
    return [spread for some in _bunches(rows, [len(row.token_ids) for row in rows]) for spread in _unpack(some)]


def _unpack(rows: Sequence[PackedRow]) -> list[SpreadRow]:
    tokens, runs = [len(row.token_ids) for row in rows], [len(row.lengths) for row in rows]
    lengths = np.concatenate([row.lengths for row in rows])
    kinds = np.concatenate([row.kinds for row in rows])
    known_runs = kinds & 1
    firsts = [0, *itertools.accumulate(runs[:-1])]
    if not all(runs) or not _fit(lengths, firsts, tokens):
        raise ValueError("the runs of a row are not as long as the row")
    if not _fit(lengths * known_runs, firsts, [len(row.logprobs) for row in rows]):
        raise ValueError("a row has not the logprobs that its runs speak of")
    known = np.repeat(known_runs.astype(bool), lengths)
    masks = np.repeat((kinds >> 1 & 1).astype(np.uint8), lengths)
    sources = np.repeat((kinds >> 2).astype(np.uint8), lengths)
    logprobs: F32 = np.full(len(known), np.nan, np.float32)
    logprobs[known] = np.concatenate([row.logprobs for row in rows])
    ends = list(itertools.accumulate(tokens))
    return [
        SpreadRow(masks[start:end], sources[start:end], logprobs[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _fit(counts: NDArray[Any], firsts: list[int], wanted: list[int]) -> bool:
    """Whether the counts of each row's runs, whose first ones are given, have the wanted sums."""
    sums: list[int] = np.add.reduceat(counts, firsts, dtype=np.int64).tolist()
    return sums == wanted
