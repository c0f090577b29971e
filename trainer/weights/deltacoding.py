"""How changed bytes are written: pure functions from old and new bytes to a blob, and back.

`overwrite` holds runs of changed bytes as they are after the change: applying it twice does no harm. `xor` holds the difference, packed:
applying it to the new bytes gives the old ones, so it must be applied exactly once.
"""

from __future__ import annotations

import struct
import zlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from palestra.trainer.weights.weightfiles import Damaged

Bytes = NDArray[np.uint8]
Encoding = Literal["overwrite", "xor"]
ENCODINGS: tuple[Encoding, ...] = ("overwrite", "xor")
NEAR = 4
"""Changed bytes with at most so many places between them make one run."""
RUNS = struct.Struct("<BII")
"""Before the runs of a piece: bytes per number, runs, bytes of the packed columns."""


def encode(old: Bytes, new: Bytes, encoding: Encoding) -> bytes | None:
    """What makes `old` into `new`; None where they are equal."""
    if old.tobytes() == new.tobytes():  # a copy and memcmp: many times faster than comparing elements
        return None
    if encoding == "xor":
        return zlib.compress(np.bitwise_xor(old, new).data, 1)
    at = np.flatnonzero(old != new)
    breaks = np.flatnonzero(np.diff(at) > NEAR)
    firsts = at[np.concatenate(([0], breaks + 1))]
    ends = at[np.concatenate((breaks, [len(at) - 1]))] + 1
    lengths = ends - firsts
    gaps = firsts - np.concatenate(([0], ends[:-1]))
    width = 2 if max(int(gaps.max()), int(lengths.max())) < 2**16 else 4
    # Numbers are mostly small: with equal places of all of them side by side, zlib packs the zeros away.
    columns = np.stack((gaps, lengths)).astype(f"<u{width}").view(np.uint8).reshape(2, -1, width).transpose(0, 2, 1)
    packed = zlib.compress(np.ascontiguousarray(columns).data, 1)
    return RUNS.pack(width, len(firsts), len(packed)) + packed + new[_positions(firsts, lengths)].tobytes()


def apply(held: Bytes, blob: bytes, encoding: Encoding) -> None:
    """Makes `held` what `encode` was given as new; of `xor` also what it was given as old, from the new.

    Raises:
        Damaged: `blob` does not fit.
    """
    try:
        if encoding == "xor":
            held ^= np.frombuffer(_unpacked(blob, len(held)), np.uint8)
            return
        width, runs, packed = RUNS.unpack_from(blob)
        if width not in (2, 4) or not 1 <= runs <= len(held):
            raise ValueError(f"{runs} runs with numbers of {width} bytes")
        columns = np.frombuffer(_unpacked(blob[RUNS.size : RUNS.size + packed], 2 * width * runs), np.uint8)
        numbers = np.ascontiguousarray(columns.reshape(2, width, runs).transpose(0, 2, 1)).view(f"<u{width}")
        gaps, lengths = numbers.reshape(2, runs).astype(np.int64)
        data = np.frombuffer(blob, np.uint8, offset=RUNS.size + packed)
        ends = np.cumsum(gaps + lengths)
        if ends[-1] > len(held) or lengths.sum() != len(data):
            raise ValueError("runs that lie outside, or have other bytes than they say")
        held[_positions(ends - lengths, lengths)] = data
    except (ValueError, struct.error, zlib.error) as error:
        raise Damaged(f"a changed stretch cannot be read: {error}") from None


def _positions(firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every index of runs that begin at `firsts`."""
    before = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    at: NDArray[np.int64] = np.repeat(firsts - before, lengths) + np.arange(int(lengths.sum()))
    return at


def _unpacked(blob: bytes, size: int) -> bytes:
    """Unpacks exactly `size` bytes: never more, whatever the blob holds."""
    packer = zlib.decompressobj()
    data = packer.decompress(blob, size + 1)
    if len(data) != size or not packer.eof or packer.unused_data:
        raise ValueError(f"{len(data)} bytes unpacked instead of {size}")
    return data
