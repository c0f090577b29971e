"""What a folder of weights holds, byte by byte: where each tensor lies, and checksums of all. Neither torch nor safetensors is needed.

In: a Hugging Face folder. Out: its `Layout`, which a record inside the folder (`RECORD`) keeps. Trainer and engine agent share it. Nothing
is waited for but the disk. Checksums are the first 128 bits of SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from palestra.trainer.durable import ASIDE
from palestra.trainer.types import TrainerError

RECORD = "palestra-weights.json"
"""The file of a folder that says what the folder holds; no engine reads it."""
CHUNK = 8 * 2**20
"""Bytes read at a time."""
MOST_HEADER = 256 * 2**20
"""Bytes of a safetensors header that are believed."""
READERS = 4
"""Files that are read at once."""
T = TypeVar("T")
U = TypeVar("U")


class WeightFilesError(TrainerError):
    """Root: published weights that cannot be used from a shared or local folder."""


class NotThereYet(WeightFilesError):
    """The shared folder does not have this version, or not yet."""


class Damaged(WeightFilesError):
    """Bytes differ from what their checksum says, or do not have the form they must have."""


class NoRoom(WeightFilesError):
    """The disk is full."""


@dataclass(frozen=True, slots=True)
class FileSpot:
    """A file of the folder."""

    name: str
    size: int
    digest: str
    """Of the whole file; of a safetensors file: of what stands before its tensors."""
    head: int
    """How many leading bytes `digest` is of."""


@dataclass(frozen=True, slots=True)
class TensorSpot:
    """Where the bytes of a tensor lie."""

    name: str
    dtype: str
    """In safetensors' words: F32, BF16, F8_E4M3."""
    shape: tuple[int, ...]
    file: str
    start: int
    """First byte, from the file's beginning."""
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Layout:
    """All of a folder."""

    files: tuple[FileSpot, ...]
    tensors: tuple[TensorSpot, ...]
    """By file, then by place."""
    content: str
    """Checksum of all that is said here: two folders are equal where it is."""

    def with_digests(self, digests: dict[str, str]) -> Layout:
        """The same places with other bytes: `digests` by the names of the tensors that changed."""
        tensors = tuple(replace(t, digest=digests[t.name]) if t.name in digests else t for t in self.tensors)
        return layout_of(self.files, tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)


def digest_of(data: Any) -> str:
    """Checksum of bytes, or of anything that shows its bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def layout_of(files: tuple[FileSpot, ...], tensors: tuple[TensorSpot, ...]) -> Layout:
    """A layout with its content's checksum."""
    return Layout(files, tensors, digest_of(orjson.dumps([_rows(files), _rows(tensors)])))


def _rows(spots: tuple[Any, ...]) -> list[list[Any]]:
    return [[getattr(spot, name) for name in spot.__slots__] for spot in spots]


def scan(folder: Path) -> Layout:
    """Reads a whole folder.

    Raises:
        Damaged: a file is no safetensors file although it is called one, or there is a folder inside.
        OSError: it cannot be read.
    """
    names = sorted(p.name for p in folder.iterdir() if p.name != RECORD and not p.name.startswith(ASIDE))
    found = in_threads(_scan_file, [folder / name for name in names])
    return layout_of(tuple(f for f, _ in found), tuple(t for _, tensors in found for t in tensors))


def _scan_file(path: Path) -> tuple[FileSpot, tuple[TensorSpot, ...]]:
    size = path.stat().st_size
    if path.is_dir():
        raise Damaged(f"{path} is a folder; a folder of weights holds files alone")
    with path.open("rb", buffering=0) as handle:
        if path.suffix != ".safetensors":
            return FileSpot(path.name, size, _digest(handle.fileno(), 0, size), size), ()
        spots, head = read_header(path)
        tensors = tuple(replace(spot, digest=_digest(handle.fileno(), spot.start, spot.size)) for spot in spots)
        return FileSpot(path.name, size, _digest(handle.fileno(), 0, head), head), tensors


def read_header(path: Path) -> tuple[tuple[TensorSpot, ...], int]:
    """The tensors of a safetensors file in their order, without checksums, and how many bytes stand before them.

    Raises:
        Damaged: it has another form.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER, size - 8):
            raise Damaged(f"{path} is no safetensors file: its header would have {length} bytes")
        text = handle.read(length)
    start = 8 + length
    try:
        said = orjson.loads(text)
        said.pop("__metadata__", None)
        spots = [
            TensorSpot(name, one["dtype"], tuple(one["shape"]), path.name, start + first, end - first, "")
            for name, one in said.items()
            for first, end in [one["data_offsets"]]
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{path} is no safetensors file: {type(error).__name__}: {error}") from None
    spots.sort(key=lambda spot: (spot.start, spot.size))
    at = start
    for spot in spots:
        if spot.start != at or spot.size < 0:
            raise Damaged(f"{path}: {spot.name} does not begin where the tensor before it ends")
        at += spot.size
    if at != size:
        raise Damaged(f"{path} has {size} bytes, and its header speaks of {at}")
    return tuple(spots), start


def _digest(handle: int, start: int, size: int) -> str:
    state = hashlib.sha256()
    for chunk in pieces(handle, start, size):
        state.update(chunk)
    return state.hexdigest()[:32]


def pieces(handle: int, start: int, size: int) -> Iterator[bytes]:
    """`size` bytes of an open file from `start` on, some at a time; fewer where the file ends before."""
    end = start + size
    while start < end and (chunk := os.pread(handle, min(CHUNK, end - start), start)):
        start += len(chunk)
        yield chunk


class Checker:
    """Compares folders with their layouts. A file that was found right is not read again while its inode, size and time stay."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int, int, int], str] = {}

    def check(self, folder: Path, layout: Layout) -> None:
        """Reads what was not yet read.

        Raises:
            Damaged: names the file, and the tensor in it.
            OSError: it cannot be read.
        """
        by_file: dict[str, list[TensorSpot]] = {file.name: [] for file in layout.files}
        for tensor in layout.tensors:
            by_file[tensor.file].append(tensor)
        in_threads(lambda file: self._check_file(folder / file.name, file, by_file[file.name]), list(layout.files))

    def _check_file(self, path: Path, file: FileSpot, tensors: list[TensorSpot]) -> None:
        try:
            found = path.stat()
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            raise Damaged(f"{path} has {found.st_size} bytes instead of {file.size}")
        mark = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        wanted = digest_of(orjson.dumps([_rows((file,)), _rows(tuple(tensors))]))
        if self._right.get(mark) == wanted:
            return
        with path.open("rb", buffering=0) as handle:
            if _digest(handle.fileno(), 0, file.head) != file.digest:
                raise Damaged(f"{path}: its first {file.head} bytes differ from their checksum")
            for tensor in tensors:
                if _digest(handle.fileno(), tensor.start, tensor.size) != tensor.digest:
                    raise Damaged(f"{path}: tensor {tensor.name} differs from its checksum")
        self._right[mark] = wanted
        while len(self._right) > 65_536:
            self._right.pop(next(iter(self._right)), None)


def write_record(folder: Path, version: int, layout: Layout) -> None:
    """Puts a folder's layout into it."""
    said = {"format": 1, "version": version, "files": _rows(layout.files), "tensors": _rows(layout.tensors)}
    (folder / RECORD).write_bytes(orjson.dumps({**said, "content": layout.content}))


def read_record(folder: Path) -> tuple[int, Layout]:
    """Version and layout of a folder, as its record says.

    Raises:
        Damaged: there is none, or it is not whole.
    """
    path = folder / RECORD
    try:
        said = orjson.loads(path.read_bytes())
        files = tuple(FileSpot(*row) for row in said["files"])
        tensors = tuple(TensorSpot(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in said["tensors"])
        version, content = int(said["version"]), said["content"]
    except FileNotFoundError:
        raise Damaged(f"{path} is missing: {folder} is no published folder") from None
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    layout = layout_of(files, tensors)
    if layout.content != content:
        raise Damaged(f"{path} differs from its own checksum")
    _check_places(path, layout)
    return version, layout


def _check_places(path: Path, layout: Layout) -> None:
    """A record comes from a shared folder: it must not lead anywhere else."""
    sizes = {file.name: file.size for file in layout.files}
    for name in sizes:
        if name in ("", ".", "..", RECORD) or "/" in name or "\0" in name:
            raise Damaged(f"{path} names a file {name!r}")
    for tensor in layout.tensors:
        if not 0 <= tensor.start <= tensor.start + tensor.size <= sizes.get(tensor.file, -1):
            raise Damaged(f"{path}: {tensor.name} lies outside of its file")


def in_threads(work: Callable[[T], U], items: list[T]) -> list[U]:
    """`work` of every item, several at a time, in their order; the first error is raised."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(READERS, len(items)), thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))
