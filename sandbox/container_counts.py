"""What the kernel counted in a container, read from out here where the engine runs on this machine.

In: a container's id and the id of its first process. Out: `Counts`, cheap enough for every run: the files stay open. Waits for nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from palestra.sandbox.channel import Counts

ROOT = Path("/sys/fs/cgroup")
V1 = (("memory", "memory.oom_control"), ("pids", "pids.events"), ("memory", "memory.max_usage_in_bytes"))
V2 = ("memory.events", "pids.events", "memory.peak")


class ContainerCounts:
    """Counts of one container."""

    def __init__(self, files: list[Path]) -> None:
        """Files that tell killed processes, refused ones, and the peak; the last may be absent (kernels before 5.19).

        Raises:
            OSError: one of the others cannot be read.
        """
        self._fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in files[:2]]
        if files[2].exists():
            self._fds.append(os.open(files[2], os.O_RDONLY | os.O_CLOEXEC))
        self._last = Counts()

    @classmethod
    def of(cls, container: str, pid: int, *, proc: Path = Path("/proc"), root: Path = ROOT) -> ContainerCounts | None:
        """None where that process is not of this container here: the engine is on another machine, or sees other process ids."""
        files = cgroup_files(container, pid, proc, root)
        try:
            return cls(files) if files else None
        except OSError:
            return None

    def __call__(self) -> Counts:
        """What is counted now; of a container that is gone, what was counted last."""
        if not self._fds:
            return self._last
        try:
            texts = [os.pread(fd, 4096, 0) for fd in self._fds]
        except OSError:  # its cgroup was removed
            return self._last
        peak = int(texts[2]) if len(texts) > 2 else None
        self._last = Counts(number(texts[0], b"oom_kill"), number(texts[1], b"max"), peak)
        return self._last

    def close(self) -> None:
        """Closes its files. Safe to call twice."""
        while self._fds:
            os.close(self._fds.pop())


def number(text: bytes, name: bytes) -> int:
    """The number behind a name in a file of names and numbers."""
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def cgroup_files(container: str, pid: int, proc: Path, root: Path) -> list[Path]:
    """Where a container's counts are, if this process is in it."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    if container not in paths.get("memory", paths.get("", "")):
        return []
    if "memory" in paths:
        return [root / controller / paths.get(controller, "") / name for controller, name in V1]
    return [root / paths[""] / name for name in V2]
