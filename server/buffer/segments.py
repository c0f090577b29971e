"""Append-only files of encoded groups. A group's place is known only once its bytes are on the disk.

In: blobs of the codec. Out: their places, to be written into the database afterwards; so bytes that no place names (a
torn tail, the rest of a failed write) are garbage that nobody reads. Waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.server.store.database import sync_folder
from palestra.server.types import StoreError, TrajectoryGroup
from palestra.server.wire.codec import decode_group

SUFFIX = ".seg"
_NAME = re.compile(r"\d{8,}\.seg")
_AT_ONCE = 512
"""Blobs in one call; the system takes 1,024 at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a blob lies."""

    segment: str
    """File name within the folder."""
    offset: int
    """Bytes."""
    length: int
    """Bytes."""


def read_group(folder: Path, place: Place, group_id: str) -> TrajectoryGroup:
    """The group at a place, its checksum and its id compared.

    Raises:
        StoreError: it cannot be read, is damaged, or is another one; names file and offset.
    """
    path = folder / place.segment
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            blob = os.pread(fd, place.length, place.offset)
        finally:
            os.close(fd)
        if len(blob) != place.length:
            raise StoreError(f"the file ends after {len(blob)} of {place.length} bytes")
        group = decode_group(blob, ours=True)
        if group.group_id != group_id:
            raise StoreError(f"group {group.group_id} lies here, not {group_id}")
    except (OSError, StoreError) as error:
        raise StoreError(f"{path} at offset {place.offset}: {error}") from error
    return group


class SegmentWriter:
    """The one writer of a folder of segments. Not thread-safe: its owner holds a lock."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """A new segment is begun when one has reached `max_bytes`."""
        self.folder, self._max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._fd, self._name, self._end = -1, "", 0

    @property
    def active(self) -> str:
        """The segment that the next blobs may go into; empty where there is none yet."""
        return self._name

    def append(self, blobs: Sequence[bytes]) -> list[Place]:
        """Writes all blobs, durably.

        Raises:
            StoreError: the disk is full or failed; none of them has a place.
        """
        if not blobs:
            return []
        try:
            if self._fd < 0 or self._end >= self._max_bytes:
                self._begin()
            _write_all(self._fd, blobs, self._end)
            os.fdatasync(self._fd)
        except OSError as error:
            self._abandon(self._end)
            raise StoreError(f"{self.folder}: cannot write a group: {error}; nothing of it was kept") from error
        places = []
        for blob in blobs:
            places.append(Place(self._name, self._end, len(blob)))
            self._end += len(blob)
        return places

    def take_back(self, places: Sequence[Place]) -> None:
        """Gives back the space of the last `append`, whose places could not be noted."""
        if places and places[0].segment == self._name:
            self._abandon(places[0].offset)

    def remove(self, names: Iterable[str]) -> None:
        """Deletes segments, never the active one."""
        for name in names:
            if name != self._name:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.folder / name)
        sync_folder(self.folder)

    def names(self) -> list[str]:
        """All segments of the folder, oldest first."""
        return sorted(path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def close(self) -> None:
        """Lets go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._name, self._end = -1, "", 0

    def _begin(self) -> None:
        self.close()
        names = self.names()
        number = int(names[-1].removesuffix(SUFFIX)) + 1 if names else 1
        name = f"{number:08d}{SUFFIX}"
        self._fd = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._name, self._end = name, 0
        sync_folder(self.folder)

    def _abandon(self, end: int) -> None:
        """Cuts the file at `end` and writes no more to it, since after a failed write its cached pages cannot be
        trusted: what was durable stays, the next blob begins a new file."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # only gives space back
            os.ftruncate(self._fd, end)
        empty, name = end == 0, self._name
        self.close()
        if empty:
            with contextlib.suppress(OSError):
                os.unlink(self.folder / name)


def _write_all(fd: int, blobs: Sequence[bytes], offset: int) -> None:
    views = [memoryview(blob) for blob in blobs if blob]
    while views:
        written = os.pwritev(fd, views[:_AT_ONCE], offset)  # joining them first would copy megabytes
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
