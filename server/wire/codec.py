"""A `TrajectoryGroup` as bytes, for segment files and for HTTP, packed by structure.

In: a group. Out: `magic, version, header length, checksum | msgpack header | arrays (packing.py), each padded to 8 bytes`.
Nothing is waited for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from palestra.server.types import (
    SampleError,
    StoreError,
    TrainingSample,
    TrajectoryGroup,
    VersionSpan,
    unchecked_sample,
)
from palestra.server.wire.checksum import checksum
from palestra.server.wire.packing import Cursor, PackedRow, SpreadRow, pack, padding, unpack

MAGIC = b"PLG"
VERSION = 2
_HEAD = struct.Struct("<3sBIQ")
"""magic, version, length of the msgpack header, checksum of that length and all that follows."""
_SIZE = struct.Struct("<Q")


class _Row(msgspec.Struct, array_like=True):
    rollout_id: str
    attempt: int
    group_id: str
    task_id: str
    branch: int
    tokens: int
    runs: int
    logprobs: int
    spans: list[tuple[int, int, int]]
    temperature: float
    reward: float | None
    turn_rewards: list[float | None]
    stop_reason: str
    experts: tuple[int, ...] | None


class _Header(msgspec.Struct, array_like=True):
    group_id: str
    task_id: str
    group_size: int
    rewards: dict[str, float]
    rows: list[_Row]


_encode_header = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(_Header).decode


def encode_group(group: TrajectoryGroup) -> bytes:
    """The bytes of one group.

    Raises:
        SampleError: a mask that is neither 0 nor 1, or a name that is no valid text.
    """
    packed = pack(group.samples)
    rows = [_row_of(row, arrays) for row, arrays in zip(group.samples, packed, strict=True)]
    header = _Header(group.group_id, group.task_id, group.group_size, dict(group.rewards), rows)
    try:
        head = _encode_header(header)
    except UnicodeEncodeError as error:
        raise SampleError(f"group {group.group_id!r}: a name in it is no valid text: {error}") from error
    parts = [head, padding(_HEAD.size + len(head)), *(part for arrays in packed for part in arrays.parts())]
    body = b"".join(parts)
    return _HEAD.pack(MAGIC, VERSION, len(head), checksum(body, len(head))) + body


def check_bytes(blob: bytes) -> None:
    """Raises:
    StoreError: these are not the bytes that `encode_group` made, or not all of them.
    """
    if len(blob) < _HEAD.size:
        raise StoreError(f"{len(blob)} bytes are too few for a group")
    magic, version, size, wanted = _HEAD.unpack_from(blob)
    if magic != MAGIC:
        raise StoreError("no group starts here")
    if version != VERSION:
        use = "a newer" if version > VERSION else "an older"
        raise StoreError(f"a group of format {version}, this palestra knows format {VERSION}; use {use} one")
    if len(blob) % 8 or checksum(memoryview(blob)[_HEAD.size :], size) != wanted:
        raise StoreError("a damaged group: the checksum differs")


def decode_group(blob: bytes, *, ours: bool = False) -> TrajectoryGroup:
    """The group that `encode_group` made bytes of. `ours`: the bytes come from a store that encoded checked rows itself, and their checksum
    says that they are the same; others are checked anew (laws 1 and 2).

    Raises:
        StoreError: the bytes are damaged or of a newer format.
    """
    check_bytes(blob)
    size = _HEAD.unpack_from(blob)[2]
    try:
        header = _decode_header(memoryview(blob)[_HEAD.size : _HEAD.size + size])
        cursor = Cursor(blob, _HEAD.size + size)
        packed = [_arrays_of(row, cursor) for row in header.rows]
        spread = unpack(packed)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(f"a damaged group: {error}") from error
    make = unchecked_sample if ours else TrainingSample
    samples = tuple(_sample_of(make, *parts) for parts in zip(header.rows, packed, spread, strict=True))
    return TrajectoryGroup(header.group_id, header.task_id, header.group_size, samples, header.rewards)


def join_blobs(blobs: Sequence[bytes]) -> bytes:
    """Several blobs as one body, each behind its length."""
    return b"".join(part for blob in blobs for part in (_SIZE.pack(len(blob)), blob))


def split_blobs(body: bytes) -> list[bytes]:
    """What `join_blobs` joined.

    Raises:
        StoreError: the body ends in the middle of a blob.
    """
    blobs, at = [], 0
    while at < len(body):
        if at + _SIZE.size > len(body):
            raise StoreError(f"the body ends in the middle of a length, at byte {at}")
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        if at + size > len(body):
            raise StoreError(f"the body ends in the middle of a group: {size} bytes at {at} of {len(body)}")
        blobs.append(body[at : at + size])
        at += size
    return blobs


def _row_of(row: TrainingSample, arrays: PackedRow) -> _Row:
    return _Row(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        group_id=row.group_id,
        task_id=row.task_id,
        branch=row.branch,
        tokens=len(arrays.token_ids),
        runs=len(arrays.lengths),
        logprobs=len(arrays.logprobs),
        spans=[(span.version, span.start, span.end) for span in row.spans],
        temperature=row.temperature,
        reward=row.reward,
        turn_rewards=list(row.turn_rewards),
        stop_reason=row.stop_reason,
        experts=None if arrays.experts is None else arrays.experts.shape,
    )


def _arrays_of(row: _Row, cursor: Cursor) -> PackedRow:
    return PackedRow(
        token_ids=cursor.take("<i4", row.tokens),
        lengths=cursor.take("<i4", row.runs),
        kinds=cursor.take("<u2", row.runs),
        logprobs=cursor.take("<f4", row.logprobs),
        experts=None if row.experts is None else cursor.take("<i2", math.prod(row.experts)).reshape(row.experts),
    )


def _sample_of(make: Callable[..., TrainingSample], row: _Row, arrays: PackedRow, spread: SpreadRow) -> TrainingSample:
    experts = arrays.experts
    return make(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        group_id=row.group_id,
        task_id=row.task_id,
        branch=row.branch,
        token_ids=arrays.token_ids.astype(np.int32, copy=False),
        loss_mask=spread.loss_mask,
        sources=spread.sources,
        logprobs=spread.logprobs,
        spans=tuple(VersionSpan(*span) for span in row.spans),
        temperature=row.temperature,
        reward=row.reward,
        turn_rewards=tuple(row.turn_rewards),
        stop_reason=row.stop_reason,
        routed_experts=None if experts is None else experts.astype(np.int16, copy=False),
    )
