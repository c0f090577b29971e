"""What a box's group counted, read by the service itself: a look on the path of every run. Waits for nothing."""

from __future__ import annotations

import os

from palestra.sandbox.cgroups import Hierarchy
from palestra.sandbox.channel import Counts
from palestra.sandbox.keeper.client import KeeperClient


class Meter:
    """Reads what a group counted. Its files stay open: a look is three short reads."""

    def __init__(self, where: Hierarchy, owner: str, box: str) -> None:
        """
        Raises:
            OSError: the group is gone.
        """
        first = where.version == 1
        memory, pids = where.folder("memory", owner, box), where.folder("pids", owner, box)
        self._oom = _open(memory, "memory.oom_control" if first else "memory.events", b"oom_kill ")
        self._pids = _open(pids, "pids.events", b"max ")
        self._peak = _open(memory, "memory.max_usage_in_bytes" if first else "memory.peak", b"")

    def read(self) -> tuple[int, int, int | None]:
        """Processes killed for memory, processes refused, and the most bytes at a time (None where the kernel does not say).

        Raises:
            OSError: the group was removed.
        """
        return _figure(*self._oom) or 0, _figure(*self._pids) or 0, _figure(*self._peak)

    def close(self) -> None:
        """Closes its files. Safe to call twice."""
        for fd in (self._oom[0], self._pids[0], self._peak[0]):
            if fd >= 0:
                os.close(fd)
        self._oom = self._pids = self._peak = (-1, b"")


def _open(folder: str | None, name: str, key: bytes) -> tuple[int, bytes]:
    if folder is None or not os.path.exists(f"{folder}/{name}"):
        return -1, key
    return os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC), key


def _figure(fd: int, key: bytes) -> int | None:
    if fd < 0:
        return None
    text = os.pread(fd, 512, 0)
    start = 0
    if key and not text.startswith(key):
        start = text.find(b"\n" + key) + 1
        if start == 0:
            return None
    return int(text[start + len(key) :].split(None, 1)[0])


class Witness:
    """What is known out here of a box's processes: its group's figures, or the watchdog's."""

    def __init__(self, keeper: KeeperClient, where: Hierarchy | None, number: int) -> None:
        self._keeper, self._where, self._number = keeper, where, number
        self._meter: Meter | None = None
        self._last = Counts()
        self._closed = False

    def open(self) -> None:
        """Once the box is there.

        Raises:
            OSError: its group is gone.
        """
        if self._where is not None:
            self._meter = Meter(self._where, self._keeper.hello["owner"], str(self._number))

    def __call__(self) -> Counts:
        """What was counted since the box began; once it is gone, what was counted last."""
        if self._closed:
            return self._last
        if self._meter is None:
            self._keeper.look()
            self._last = Counts(oom_kills=self._keeper.kills[self._number])
            return self._last
        try:
            self._last = Counts(*self._meter.read())
        except OSError:  # the group was removed: what it said last stays true
            return self._last
        return self._last

    def close(self) -> None:
        """The box is going."""
        self()
        self._closed = True
        if self._meter is not None:
            self._meter.close()
