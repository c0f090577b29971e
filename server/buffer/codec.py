"""A `TrajectoryGroup` as bytes, for segment files and for HTTP, packed by structure.

In: a group. Out: `magic, version, crc32, header length | msgpack header | arrays, each padded to 8 bytes`. Mask,
source and the places that have a logprob change seldom along a row, so they travel as runs; logprobs travel only
where there is one. Nothing is waited for. Decoded arrays are read-only views of the bytes where that is possible.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from palestra.server.types import (
    F32,
    I16,
    SampleError,
    StoreError,
    TrainingSample,
    TrajectoryGroup,
    VersionSpan,
)

MAGIC = b"PLG"
VERSION = 1
_HEAD = struct.Struct("<3sBII")
"""magic, version, crc32 of all that follows these first 8 bytes, length of the msgpack header."""
_COVERED = 8
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
    parts: list[bytes] = []
    rows = [_encode_row(row, parts) for row in group.samples]
    header = _Header(group.group_id, group.task_id, group.group_size, dict(group.rewards), rows)
    try:
        head = _encode_header(header)
    except UnicodeEncodeError as error:
        raise SampleError(f"group {group.group_id!r}: a name in it is no valid text: {error}") from error
    body = b"".join([_padded(head, _HEAD.size), *parts])
    length = struct.pack("<I", len(head))
    return _HEAD.pack(MAGIC, VERSION, zlib.crc32(body, zlib.crc32(length)), len(head)) + body


def check_bytes(blob: bytes) -> None:
    """Raises:
    StoreError: these are not the bytes that `encode_group` made, or not all of them.
    """
    if len(blob) < _HEAD.size:
        raise StoreError(f"{len(blob)} bytes are too few for a group")
    magic, version, crc, _ = _HEAD.unpack_from(blob)
    if magic != MAGIC:
        raise StoreError("no group starts here")
    if version > VERSION:
        raise StoreError(f"a group of format {version}, this palestra knows formats up to {VERSION}; use a newer one")
    if zlib.crc32(memoryview(blob)[_COVERED:]) != crc:
        raise StoreError("a damaged group: the checksum differs")


def decode_group(blob: bytes) -> TrajectoryGroup:
    """The group that `encode_group` made bytes of.

    Raises:
        StoreError: the bytes are damaged or of a newer format.
    """
    check_bytes(blob)
    size = _HEAD.unpack_from(blob)[3]
    try:
        header = _decode_header(memoryview(blob)[_HEAD.size : _HEAD.size + size])
        at = _aligned(_HEAD.size + size)
        samples = []
        for row in header.rows:
            sample, at = _decode_row(row, blob, at)
            samples.append(sample)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(f"a damaged group: {error}") from error
    return TrajectoryGroup(header.group_id, header.task_id, header.group_size, tuple(samples), header.rewards)


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


def _aligned(at: int) -> int:
    return -(-at // 8) * 8


def _padded(data: bytes, before: int = 0) -> bytes:
    return data + bytes(_aligned(before + len(data)) - before - len(data))


def _encode_row(row: TrainingSample, parts: list[bytes]) -> _Row:
    if row.loss_mask.max(initial=0) > 1:
        raise SampleError(
            f"row {row.rollout_id}/{row.attempt} branch {row.branch}: the loss mask holds more than 0 and 1"
        )
    known = ~np.isnan(row.logprobs)
    kinds = (row.sources.astype(np.uint16) << 2) | (row.loss_mask.astype(np.uint16) << 1) | known
    starts = np.concatenate([[0], np.flatnonzero(np.diff(kinds)) + 1])
    lengths = np.diff(np.append(starts, len(kinds)))
    logprobs = row.logprobs[known]
    for array, kind in ((row.token_ids, "<i4"), (lengths, "<i4"), (kinds[starts], "<u2"), (logprobs, "<f4")):
        parts.append(_padded(np.ascontiguousarray(array, kind).tobytes()))
    experts = row.routed_experts
    if experts is not None:
        parts.append(_padded(np.ascontiguousarray(experts, "<i2").tobytes()))
    return _Row(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        group_id=row.group_id,
        task_id=row.task_id,
        branch=row.branch,
        tokens=len(row.token_ids),
        runs=len(starts),
        logprobs=len(logprobs),
        spans=[(span.version, span.start, span.end) for span in row.spans],
        temperature=row.temperature,
        reward=row.reward,
        turn_rewards=list(row.turn_rewards),
        stop_reason=row.stop_reason,
        experts=None if experts is None else experts.shape,
    )


def _array(blob: bytes, at: int, kind: str, count: int) -> tuple[NDArray[Any], int]:
    array = np.frombuffer(blob, kind, count, at)
    return array, _aligned(at + array.nbytes)


def _decode_row(row: _Row, blob: bytes, at: int) -> tuple[TrainingSample, int]:
    token_ids, at = _array(blob, at, "<i4", row.tokens)
    lengths, at = _array(blob, at, "<i4", row.runs)
    kinds, at = _array(blob, at, "<u2", row.runs)
    values, at = _array(blob, at, "<f4", row.logprobs)
    whole = np.repeat(kinds, lengths)
    logprobs: F32 = np.full(row.tokens, np.nan, np.float32)
    logprobs[(whole & 1).astype(bool)] = values
    experts: I16 | None = None
    if row.experts is not None:
        flat, at = _array(blob, at, "<i2", int(np.prod(row.experts)))
        experts = flat.astype(np.int16, copy=False).reshape(row.experts)
    sample = TrainingSample(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        group_id=row.group_id,
        task_id=row.task_id,
        branch=row.branch,
        token_ids=token_ids.astype(np.int32, copy=False),
        loss_mask=((whole >> 1) & 1).astype(np.uint8),
        sources=(whole >> 2).astype(np.uint8),
        logprobs=logprobs,
        spans=tuple(VersionSpan(*span) for span in row.spans),
        temperature=row.temperature,
        reward=row.reward,
        turn_rewards=tuple(row.turn_rewards),
        stop_reason=row.stop_reason,
        routed_experts=experts,
    )
    return sample, at
