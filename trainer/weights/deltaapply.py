"""Puts published versions together on an engine's host: the reading side of `delta`. No torch.

In: a shared folder with full folders, deltas and their manifest. Out: `LOCAL/vN`, a Hugging Face folder whose every byte was compared
with its checksum, there whole or not at all. Of all ways to a version (a local one and the deltas after it, or a full folder and the
deltas after it) the one with the fewest bytes is taken; what turns out damaged on the way is left out, and the next way is tried. It
waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.trainer.durable import ASIDE, folder_aside, remove_unfinished
from palestra.trainer.weights.deltaformat import DeltaFile, Entry, read_manifest
from palestra.trainer.weights.deltapatch import link, patch
from palestra.trainer.weights.weightfiles import (
    RECORD,
    Checker,
    Damaged,
    Layout,
    NoRoom,
    NotThereYet,
    WeightFilesError,
    digest_of,
    in_threads,
    read_record,
    write_record,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that is ready."""

    path: Path
    bytes: int
    """Read from the shared folder; 0 where the version was there already."""
    seconds: float
    source: Literal["delta", "full"]
    """`delta`: it was made from what was here."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a version is put together."""

    local: int | None
    """The local version that it begins with."""
    base: Entry | None
    """Or the full folder."""
    deltas: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """What has to be read from the shared folder."""
        return sum(entry.bytes for entry in self.deltas) + (0 if self.base is None else self.base.bytes)


class _Fault(Exception):
    """`part` of a way is unusable, by its name."""

    def __init__(self, part: str, why: BaseException) -> None:
        super().__init__(f"{part}: {why}")
        self.part = part


def find_way(entries: Sequence[Entry], local: set[int], version: int, without: set[str]) -> Way | None:
    """The way to `version` with the fewest bytes, that uses nothing named in `without` (names of entries, and `vN` of local folders)."""
    by_version = {entry.version: entry for entry in entries}
    deltas: list[Entry] = []
    ways: list[Way] = []
    at: int | None = version
    while at is not None:
        entry = by_version.get(at)
        if at in local and f"v{at}" not in without:
            ways.append(Way(at, None, tuple(reversed(deltas))))
        if entry is None or entry.name in without:
            break
        if entry.kind == "base":
            ways.append(Way(None, entry, tuple(reversed(deltas))))
            break
        deltas.append(entry)
        # A base that is not older would lead round in a circle.
        at = entry.base if entry.base is not None and entry.base < at else None
    return min(ways, key=lambda way: way.bytes, default=None)


class LocalFolder:
    """The versions on this host. One process at a time has it, and one call of `pull` at a time runs."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        """`keep`: versions that stay. The disk needs room for so many, at least for two.

        Raises:
            WeightFilesError: another agent has this folder.
            OSError: it cannot be made.
        """
        self.root, self._keep = root, keep
        self._checker = Checker()
        root.mkdir(parents=True, exist_ok=True)
        self._lock = (root / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise WeightFilesError(f"another engine agent uses {root}: give this one a folder of its own") from None
        remove_unfinished(root)

    def close(self) -> None:
        """Lets another process have the folder."""
        self._lock.close()

    def versions(self) -> list[int]:
        """What is here, the most recently used last."""
        found = []
        for path in self.root.glob("v*"):
            # `status` is asked while a pull goes on: what is removed meanwhile is not here.
            with suppress(FileNotFoundError):
                if path.name[1:].isdigit():
                    found.append((path.stat().st_mtime_ns, int(path.name[1:])))
        return [version for _, version in sorted(found)]

    def pull(self, version: int, shared: Path) -> Pulled:
        """Makes `version` of the shared folder ready here.

        Raises:
            NotThereYet: the shared folder does not have it.
            Damaged: no way to it is whole; the message names each fault.
            NoRoom: the local disk is full.
            WeightFilesError: something else could not be read or written.
        """
        started = time.monotonic()
        faults: dict[str, str] = {}
        try:
            while True:
                entries = read_manifest(shared)
                wanted = next((entry for entry in entries if entry.version == version), None)
                if wanted is None:
                    newest = f"its newest is {entries[-1].version}" if entries else "it has none"
                    raise NotThereYet(f"{shared} does not have version {version}: {newest}")
                way = find_way(entries, self._usable(entries), version, set(faults))
                if way is None:
                    raise Damaged(
                        f"version {version} cannot be put together from {shared}: {'; '.join(faults.values()) or 'a gap'}. "
                        "The next full folder mends it"
                    )
                try:
                    self._go(way, wanted, shared)
                except _Fault as fault:
                    faults[fault.part] = str(fault)
                    log.warning("version %d: %s; another way is tried", version, fault)
                    continue
                break
        except OSError as error:
            raise self._told(error, version) from error
        os.utime(self.root / f"v{version}")
        self._remove_old(self._keep, version)
        source: Literal["delta", "full"] = "full" if way.base is not None else "delta"
        return Pulled(self.root / f"v{version}", way.bytes, time.monotonic() - started, source)

    def _usable(self, entries: Sequence[Entry]) -> set[int]:
        """Local versions that are what the shared folder has under the same number."""
        contents = {entry.version: entry.content for entry in entries}
        usable = set()
        for version in self.versions():
            try:
                if read_record(self.root / f"v{version}")[1].content == contents.get(version):
                    usable.add(version)
            except Damaged as error:
                log.warning("local version %d is left out: %s", version, error)
        return usable

    def _go(self, way: Way, wanted: Entry, shared: Path) -> None:
        """Goes one way; the result is checked and in place after it."""
        target = self.root / f"v{wanted.version}"
        start = f"v{way.local}" if way.base is None else way.base.name
        source = (self.root if way.base is None else shared) / start
        if way.local is not None:
            with _blame(start):
                layout = self._checked(source)
            if way.local == wanted.version:
                return
        self._remove_old(max(1, self._keep - 1), way.local)
        with folder_aside(target) as aside, ExitStack() as opened:
            own: set[str] = set()
            with _blame(start):
                if way.base is None:
                    for file in layout.files:
                        link(source / file.name, aside / file.name)
                else:
                    layout = self._copied(source, way.base, aside)
                    own.update(file.name for file in layout.files)
            for entry in way.deltas:
                with _blame(entry.name):
                    delta = opened.enter_context(DeltaFile(shared / entry.name, entry.digest))
                    layout = patch(aside, layout, delta, entry, own)
            # All parts were right by their own checksums, so a wrong result is the fault of what it began with or of the last delta.
            with _blame(way.deltas[-1].name if way.deltas and way.base is not None else start):
                self._compare(aside, layout, wanted)
            write_record(aside, wanted.version, layout)

    def _checked(self, folder: Path) -> Layout:
        try:
            _, layout = read_record(folder)
            self._checker.check(folder, layout)
        except OSError as error:  # a disk that gives no bytes is no better than one that gives wrong ones
            raise Damaged(f"{folder} cannot be read: {error}") from error
        return layout

    def _copied(self, base: Path, entry: Entry, aside: Path) -> Layout:
        """Copies a full folder and compares it."""
        if digest_of((base / RECORD).read_bytes()) != entry.digest:
            raise Damaged(f"{base / RECORD} differs from its checksum in the manifest")
        _, layout = read_record(base)
        in_threads(lambda file: shutil.copyfile(base / file.name, aside / file.name), list(layout.files))
        self._checker.check(aside, layout)
        return layout

    def _compare(self, aside: Path, layout: Layout, wanted: Entry) -> None:
        if layout.content != wanted.content:
            raise Damaged(f"version {wanted.version} is not what the manifest says")
        self._checker.check(aside, layout)

    def _remove_old(self, keep: int, needed: int | None) -> None:
        for version in self.versions()[:-keep]:
            if version != needed:
                # Out of sight first: a folder with a version's name is whole at any time.
                aside = self.root / f"{ASIDE}old-v{version}"
                (self.root / f"v{version}").rename(aside)
                shutil.rmtree(aside)

    def _told(self, error: OSError, version: int) -> WeightFilesError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.root).free / 2**30
            return NoRoom(
                f"no room for version {version} in {self.root} ({free:.1f} GiB free): nothing of it is kept. Make room, or give "
                "--local a folder on another disk"
            )
        return WeightFilesError(f"version {version} could not be fetched: {error}")


@contextmanager
def _blame(part: str) -> Iterator[None]:
    """Faults inside are `part`'s. A file that is gone is one: the trainer removes old ones."""
    try:
        yield
    except (Damaged, FileNotFoundError) as error:
        raise _Fault(part, error) from error
