"""The file of a delta (`delta-vN.pal`) and the list of what a shared folder has (`MANIFEST.json`). Nothing heavy
is imported.

A delta holds what changed between two versions' bytes. From its beginning: MAGIC; the encoded pieces, one after another; a zlib-packed JSON
header with both versions, the result's checksums and every tensor's name and shape; the header's length (8 bytes); the SHA-256 of all
before it (32 bytes). The header comes last so that a writer need not know it first.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import orjson

from palestra.trainer.durable import sync_file, write_text
from palestra.trainer.weights.deltacoding import ENCODINGS, Encoding
from palestra.trainer.weights.weightfiles import CHUNK, Damaged, Layout, TensorSpot, pieces

MAGIC = b"PALDELTA"
PIECE = 4 * 2**20
"""Bytes of a tensor that are encoded together."""
MOST_HEADER = 2**30
TAIL = 8 + 32
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a tensor in which bytes changed."""

    tensor: int
    """Which of the header's tensors."""
    start: int
    """First byte, from the tensor's beginning."""
    size: int
    encoded: int
    """Bytes in the file."""


@dataclass(frozen=True, slots=True)
class DeltaHead:
    """What a delta says of itself."""

    version: int
    base: int
    """The version whose bytes it changes."""
    base_content: str
    """`Layout.content` of that version, and of the result."""
    content: str
    encoding: Encoding
    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]
    """Name, dtype, shape and the result's checksum of every tensor, changed or not, in the layout's order."""
    pieces: tuple[Piece, ...]


class DeltaWriter:
    """Writes one delta file, piece by piece. What was written is of no use before `finish`."""

    def __init__(self, path: Path) -> None:
        self._path, self._pieces = path, list[Piece]()
        self._sum = hashlib.sha256()
        self._file = path.open("wb")
        self.written = 0
        self._put(MAGIC)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._sum.update(data)
        self.written += len(data)

    def add(self, tensor: int, start: int, size: int, blob: bytes) -> None:
        """A changed stretch of `size` bytes of the tensor with this place in the layout."""
        self._pieces.append(Piece(tensor, start, size, len(blob)))
        self._put(blob)

    def finish(self, version: int, base: int, before: Layout, after: Layout, encoding: Encoding) -> str:
        """Closes the file, flushed to the disk; its checksum."""
        tensors = [(t.name, t.dtype, t.shape, t.digest) for t in after.tensors]
        rows = [(p.tensor, p.start, p.size, p.encoded) for p in self._pieces]
        head = {"format": 1, "version": version, "base": base, "base_content": before.content}
        head |= {"content": after.content, "encoding": encoding, "tensors": tensors, "pieces": rows}
        packed = zlib.compress(orjson.dumps(head), 6)
        self._put(packed)
        self._put(len(packed).to_bytes(8, "little"))
        digest = self._sum.digest()
        self._file.write(digest)
        self.written += len(digest)
        self.close()
        sync_file(self._path)
        return digest.hex()

    def close(self) -> None:
        """Closes the file, whole or not."""
        self._file.close()


class DeltaFile:
    """A delta that is read. Opening it checks all its bytes against its checksum and the one that the manifest gives."""

    def __init__(self, path: Path, digest: str) -> None:
        """Raises:
        Damaged: it is not the file that was written.
        OSError: it cannot be read.
        """
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._check(digest)
            self.head = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> DeltaFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _check(self, digest: str) -> None:
        state = hashlib.sha256()
        for chunk in pieces(self._file.fileno(), 0, self.size - 32):
            state.update(chunk)
        tail = os.pread(self._file.fileno(), 32, max(0, self.size - 32))
        if self.size < len(MAGIC) + TAIL or state.digest() != tail or tail.hex() != digest:
            raise Damaged(f"{self.path} ({self.size} bytes) differs from its checksum")

    def _read_head(self) -> DeltaHead:
        handle = self._file.fileno()
        length = int.from_bytes(os.pread(handle, 8, self.size - TAIL), "little")
        start = self.size - TAIL - length
        try:
            if os.pread(handle, len(MAGIC), 0) != MAGIC or start < len(MAGIC):
                raise ValueError("not a delta")
            packer = zlib.decompressobj()
            said = orjson.loads(packer.decompress(os.pread(handle, length, start), MOST_HEADER))
            tensors = tuple((name, dtype, tuple(shape), digest) for name, dtype, shape, digest in said["tensors"])
            rows = tuple(Piece(*row) for row in said["pieces"])
            if said["format"] != 1 or said["encoding"] not in ENCODINGS:
                raise ValueError(f"format {said['format']!r}, encoding {said['encoding']!r}")
            if len(MAGIC) + sum(row.encoded for row in rows) != start:
                raise ValueError("its pieces are not all there")
            contents = str(said["base_content"]), str(said["content"])
            return DeltaHead(int(said["version"]), int(said["base"]), *contents, said["encoding"], tensors, rows)
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            raise Damaged(f"{self.path} cannot be read: {type(error).__name__}: {error}") from None

    def changes(self) -> Iterator[tuple[Piece, int]]:
        """Pieces in the file's order, each with where its bytes begin."""
        at = len(MAGIC)
        for piece in self.head.pieces:
            yield piece, at
            at += piece.encoded

    def blob(self, at: int, size: int) -> bytes:
        """Bytes of the file."""
        return b"".join(pieces(self._file.fileno(), at, size))


@dataclass(frozen=True, slots=True)
class Entry:
    """One published version in the manifest."""

    version: int
    kind: Literal["base", "delta"]
    base: int | None
    """The version that a delta changes; None of a base."""
    bytes: int
    digest: str
    """Of the delta file; of a base: of its record."""
    content: str
    """`Layout.content` of the version."""

    @property
    def name(self) -> str:
        """Of its file or folder."""
        return f"base-v{self.version}" if self.kind == "base" else f"delta-v{self.version}.pal"


def read_manifest(shared: Path) -> tuple[Entry, ...]:
    """What the shared folder has, oldest first; nothing where it has no manifest.

    Raises:
        Damaged: the manifest is not whole.
        OSError: it cannot be read.
    """
    path = shared / MANIFEST
    try:
        said = orjson.loads(path.read_bytes())
        if said["format"] != 1:
            raise ValueError(f"format {said['format']!r}")
        entries = tuple(Entry(**one) for one in said["versions"])
        versions = [int(entry.version) for entry in entries]
        if versions != sorted(set(versions)) or any(entry.kind not in ("base", "delta") for entry in entries):
            raise ValueError("versions out of order")
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    return entries


def write_manifest(shared: Path, entries: Sequence[Entry]) -> None:
    """Replaces the manifest, durably: the last step of a publish."""
    said = {"format": 1, "versions": [asdict(entry) for entry in entries]}
    write_text(shared / MANIFEST, orjson.dumps(said).decode())


def check_fits(head: DeltaHead, tensors: Sequence[TensorSpot]) -> None:
    """Whether a delta speaks of these tensors.

    Raises:
        Damaged: names the first that differs.
    """
    if len(head.tensors) != len(tensors):
        raise Damaged(
            f"delta of version {head.version} is of {len(head.tensors)} tensors, the folder has {len(tensors)}"
        )
    for (name, dtype, shape, _), spot in zip(head.tensors, tensors, strict=True):
        if (name, dtype, shape) != (spot.name, spot.dtype, spot.shape):
            raise Damaged(f"delta of version {head.version}: {name} {dtype} {shape} where {spot.name} lies")
    for piece in head.pieces:
        if not (0 <= piece.tensor < len(tensors) and 0 <= piece.start <= tensors[piece.tensor].size - piece.size):
            raise Damaged(f"delta of version {head.version} changes bytes outside of its tensors")
        if not 0 < piece.size <= max(PIECE, CHUNK):
            raise Damaged(f"delta of version {head.version} has a piece of {piece.size} bytes")
