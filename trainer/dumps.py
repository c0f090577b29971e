"""Claimed batches as files: what a step was trained on, so that it can be trained again without engines.

In: the groups of a step and where they come from. Out: a file a step, `step-00000007.batch`, there whole or not at all:
`magic, format, header length, checksum | msgpack header | groups as server/wire/codec.py writes them`. A folder belongs to one run.
Nothing is waited for but the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palestra.server.types import SampleError, StoreError, TrajectoryGroup
from palestra.server.wire.checksum import checksum
from palestra.server.wire.codec import decode_group, encode_group, join_blobs, split_blobs
from palestra.server.wire.packing import padding
from palestra.trainer.durable import ASIDE, sync_file
from palestra.trainer.types import TrainerError

NAME = re.compile(r"step-(\d{8,})\.batch")
MAGIC, FORMAT = b"PLDUMP", 1
_HEAD = struct.Struct("<6sHQQ")
"""magic, format, length of the header, checksum of that length and all that follows."""


class DumpError(TrainerError):
    """A dumped batch that is missing, damaged, foreign or of another run, or that cannot be written."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a batch comes from."""

    run: str
    """`run.name`."""
    step: int
    """The train step that it is of, from 1."""
    policy_version: int
    """Of the weights that it was trained on; of a batch that was only played, of those that played it."""
    optimizer_steps: int
    """Optimizer steps of the run before it."""
    fingerprint: str
    """Of the model's configuration."""
    config_hash: str
    """Of the run's configuration."""
    trained: bool
    """False where the run only played."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step claimed."""

    origin: Origin
    groups: tuple[TrajectoryGroup, ...]


def batch_path(folder: Path, step: int) -> Path:
    """Where the batch of a step is, or would be."""
    return folder / f"step-{step:08d}.batch"


def batch_files(folder: Path) -> list[Path]:
    """The batches of a folder in the order of their steps; none where there is no such folder. Other files are left alone."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((folder / name for name in names if NAME.fullmatch(name)), key=_step_of)


def _step_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None, "only names that match are asked for"
    return int(found[1])


def write_batch(folder: Path, batch: Batch) -> Path:
    """Writes a batch durably, in the place of an earlier one of its step.

    Raises:
        DumpError: the disk refused, or a group cannot be written.
    """
    target = batch_path(folder, batch.origin.step)
    aside = target.with_name(f"{ASIDE}{target.name}-{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(encode_batch(batch))
        sync_file(aside)
        aside.rename(target)
        sync_file(folder)
    except (OSError, SampleError) as error:
        with contextlib.suppress(OSError):  # what could not be written may not be there
            aside.unlink()
        raise DumpError(f"{target}: the batch could not be written (run.dump): {error}") from error
    return target


def read_batch(path: Path) -> Batch:
    """The batch of a file.

    Raises:
        DumpError: it is not there, damaged, of another format or no batch at all; the message has its path.
    """
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return decode_batch(blob)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch.

    Raises:
        SampleError: a group that has no form in bytes.
    """
    header = msgspec.msgpack.encode(batch.origin)
    body = b"".join([header, padding(len(header)), join_blobs([encode_group(group) for group in batch.groups])])
    return _HEAD.pack(MAGIC, FORMAT, len(header), checksum(body, len(header))) + body


def decode_batch(blob: bytes) -> Batch:
    """The batch that `encode_batch` made bytes of; its rows are checked anew (laws 1 and 2).

    Raises:
        DumpError: these are other bytes, or not all of them.
    """
    if len(blob) < _HEAD.size or not blob.startswith(MAGIC):
        raise DumpError(
            "this is no batch that palestra dumped; name a file or folder that --rollout-only or run.dump wrote"
        )
    _, form, size, wanted = _HEAD.unpack_from(blob)
    if form != FORMAT:
        use = "a newer" if form > FORMAT else "an older"
        raise DumpError(f"a batch of format {form}, this palestra knows format {FORMAT}; use {use} one")
    body = memoryview(blob)[_HEAD.size :]
    if len(body) % 8 or checksum(body, size) != wanted:
        raise DumpError(
            "the file is damaged (its checksum differs): copy it again, or move it away and go on without it"
        )
    try:
        origin = msgspec.msgpack.decode(body[:size], type=Origin)
        groups = [decode_group(each) for each in split_blobs(bytes(body[size + len(padding(size)) :]))]
    except (msgspec.DecodeError, StoreError, SampleError) as error:
        raise DumpError(f"the file was written by a faulty program: {error}") from error
    return Batch(origin, tuple(groups))


def choose_batch(path: Path) -> Path:
    """The file that is meant: `path` itself, or the last batch of a folder.

    Raises:
        DumpError: a folder without batches.
    """
    if not path.is_dir():
        return path
    found = batch_files(path)
    if not found:
        raise DumpError(f"{path}: no batch is there (step-00000001.batch and so on)")
    return found[-1]


def check_origin(batch: Batch, path: Path, fingerprint: str) -> None:
    """Token ids and logprobs say nothing to another model.

    Raises:
        DumpError: the batch was played by a model of another shape.
    """
    if batch.origin.fingerprint != fingerprint:
        raise DumpError(
            f"{path}: played by a model of another shape than model.path, in run {batch.origin.run!r}; "
            f"give the model that played it"
        )
