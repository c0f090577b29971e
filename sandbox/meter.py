"""What a box's group counted, read by the service itself: a look on the path of every run. Waits for nothing."""

from __future__ import annotations

import os

from palestra.sandbox.cgroups import Hierarchy
from palestra.sandbox.channel import Counts
from palestra.sandbox.keeper.client import KeeperClient


class CountFiles:
    """What a group counted. Its files stay open: a look is three short reads."""

    def __init__(self, oom: str | None, pids: str | None, peak: str | None) -> None:
        """Files that tell killed processes, refused ones, and the most bytes at a time; what is None or not there counts nothing.

        Raises:
            OSError: the group is gone.
        """
        self._files = [_open(oom, b"oom_kill "), _open(pids, b"max "), _open(peak, b"")]
        self._last = Counts()

    def read(self) -> tuple[int, int, int | None]:
        """Processes killed for memory, processes refused, and the most bytes at a time (None where the kernel does not say).

        Raises:
            OSError: the group was removed.
        """
        oom, pids, peak = (_figure(fd, key) for fd, key in self._files)
        return oom or 0, pids or 0, peak

    def __call__(self) -> Counts:
        """What is counted now; of a group that is gone, or after `close`, what was counted last."""
        if self._files:
            try:
                self._last = Counts(*self.read())
            except OSError:  # the group was removed: what it said last stays true
                return self._last
        return self._last

    def close(self) -> None:
        """Closes its files. Safe to call twice."""
        while self._files:
            fd, _ = self._files.pop()
            if fd >= 0:
                os.close(fd)


class Meter(CountFiles):
    """Of a group that the keeper made."""

    def __init__(self, where: Hierarchy, owner: str, box: str) -> None:
        """
        Raises:
            OSError: the group is gone.
        """
        first = where.version == 1
        memory, pids = where.folder("memory", owner, box), where.folder("pids", owner, box)
        super().__init__(
            memory and f"{memory}/{'memory.oom_control' if first else 'memory.events'}",
            pids and f"{pids}/pids.events",
            memory and f"{memory}/{'memory.max_usage_in_bytes' if first else 'memory.peak'}",
        )


def _open(path: str | None, key: bytes) -> tuple[int, bytes]:
    if path is None or not os.path.exists(path):
        return -1, key
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), key


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
        else:
            self._last = self._meter()
        return self._last

    def close(self) -> None:
        """The box is going."""
        self()
        self._closed = True
        if self._meter is not None:
            self._meter.close()
