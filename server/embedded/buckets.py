"""Buckets: several tensors in one run of bytes, and where such a run comes from: POSIX shared memory or safetensors by value.

In: what an update's body says. Out: tensors of this process's own, under their Hugging Face names. Waits for the copy. No pickle is ever
read.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load

from palestra.server.embedded.types import TensorSlot, WeightsRefused

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights may be made of on the wire; they are put in as the model's own type."""
SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9_.\-]{0,200})")


class _Slot(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: str
    dtype: str
    shape: list[int]
    offset: int = Field(ge=0)


class _Segment(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    shm: str
    nbytes: int = Field(gt=0)
    tensors: list[_Slot] = Field(min_length=1)


def size_of(slot: TensorSlot) -> int:
    """Bytes of one tensor."""
    return math.prod(slot.shape) * FLOATS[slot.dtype].itemsize


def unfold(flat: torch.Tensor, slots: Sequence[TensorSlot]) -> dict[str, torch.Tensor]:
    """Views into a run of bytes ([n] uint8), by name.

    Raises:
        WeightsRefused: one does not lie within the run, or begins in the middle of a number.
    """
    tensors = {}
    for slot in slots:
        end, unit = slot.offset + size_of(slot), FLOATS[slot.dtype].itemsize
        if end > len(flat) or slot.offset % unit:
            raise WeightsRefused(
                f"{slot.name}: bytes {slot.offset} to {end} of {len(flat)} are no place for {list(slot.shape)} of {slot.dtype}"
            )
        tensors[slot.name] = flat[slot.offset : end].view(FLOATS[slot.dtype]).view(slot.shape)
    return tensors


def describe(segment: str) -> tuple[str, int, tuple[TensorSlot, ...]]:
    """The name, length and tensors that a base64 encoded JSON object tells of a shared memory segment.

    Raises:
        WeightsRefused: it is not understood.
    """
    try:
        told = _Segment.model_validate_json(base64.b64decode(segment, validate=True))
    except (binascii.Error, ValidationError) as fault:
        raise WeightsRefused(
            f"serialized_named_tensors is no base64 of a shared memory description: {fault}"
        ) from fault
    slots = tuple(TensorSlot(slot.name, slot.dtype, tuple(slot.shape), slot.offset) for slot in told.tensors)
    return told.shm, told.nbytes, slots


def read_segment(name: str, nbytes: int, slots: Sequence[TensorSlot]) -> dict[str, torch.Tensor]:
    """Copies the tensors out of a segment; the sender may use it again, or drop it, as soon as this returns.

    Raises:
        WeightsRefused: there is no such segment, it is shorter than told, or a tensor does not lie in it.
    """
    found = _SEGMENT.fullmatch(name)
    if found is None:
        raise WeightsRefused(f"{name[:80]!r} is no name of a shared memory segment")
    # Opened as a file and copied: multiprocessing.SharedMemory would have Python 3.11's resource tracker unlink the sender's segment when
    # this process ends, and a mapping would end this process if the sender cut the segment short meanwhile.
    path = SHARED_MEMORY / found[1]
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as fault:
        raise WeightsRefused(f"shared memory {found[1]} cannot be opened on this host: {fault.strerror}") from fault
    try:
        # Before anything is allocated: a told length is no length.
        if os.fstat(file).st_size < nbytes:
            raise WeightsRefused(f"shared memory {found[1]} has {os.fstat(file).st_size} bytes, not {nbytes}")
        flat = torch.empty(nbytes, dtype=torch.uint8)
        into, at = memoryview(flat.numpy().data), 0
        while at < nbytes:
            count = os.preadv(file, [into[at:]], at)
            if not count:
                raise WeightsRefused(f"shared memory {found[1]} was cut to {at} bytes while it was read")
            at += count
    except OSError as fault:
        raise WeightsRefused(f"shared memory {found[1]} cannot be read: {fault.strerror}") from fault
    finally:
        os.close(file)
    return unfold(flat, slots)


def read_blobs(blobs: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of base64 encoded safetensors blobs.

    Raises:
        WeightsRefused: one is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for blob in blobs:
            tensors.update(load(base64.b64decode(blob, validate=True)))
    except (binascii.Error, SafetensorError) as fault:
        raise WeightsRefused(f"serialized_named_tensors is no base64 of a safetensors blob: {fault}") from fault
    return tensors
