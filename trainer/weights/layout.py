"""Where every tensor lies in the buckets of a publish: computed once, since names, dtypes and shapes stay. Pure, without torch.

In: names, dtypes, shapes and sizes in the order of an export. Out: buckets of tensors with their offsets, each at most `limit` bytes; a
tensor that is larger has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 16
"""Offsets in a bucket are multiples of it: of every dtype's size, and of what vector loads want."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its numbers."""

    name: str
    dtype: str
    """As torch names it, without "torch."."""
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int
    """Bytes of one number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor's place in its bucket."""

    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Tensors that travel together."""

    index: int
    pieces: tuple[Piece, ...]
    nbytes: int
    last: bool
    """Whether it is a publish's last one."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """All buckets of a publish."""

    buckets: tuple[BucketPlan, ...]
    nbytes: int
    """Of all tensors, gaps not counted."""
    largest: int
    """Bytes of the largest bucket."""


def plan_buckets(specs: Iterable[Spec], limit: int, *, packed: bool = False) -> BucketLayout:
    """Groups tensors in their order. `packed`: without gaps, as engines lay out what they receive; a tensor whose offset would not suit its
    dtype then begins another bucket.

    Raises:
        ValueError: there is no tensor, or a name comes twice.
    """
    plans: list[list[Piece]] = [[]]
    end, total, names = 0, 0, set[str]()
    for spec in specs:
        if spec.name in names:
            raise ValueError(f"{spec.name} comes twice")
        names.add(spec.name)
        total += spec.nbytes
        offset = end if packed else -(-end // ALIGNMENT) * ALIGNMENT
        if plans[-1] and (offset + spec.nbytes > limit or offset % spec.itemsize):
            plans.append([])
            offset = 0
        plans[-1].append(Piece(spec, offset))
        end = offset + spec.nbytes
    if not names:
        raise ValueError("there are no weights")
    sizes = [pieces[-1].offset + pieces[-1].spec.nbytes for pieces in plans]
    buckets = tuple(
        BucketPlan(i, tuple(pieces), size, i == len(plans) - 1)
        for i, (pieces, size) in enumerate(zip(plans, sizes, strict=True))
    )
    return BucketLayout(buckets, total, max(sizes))
