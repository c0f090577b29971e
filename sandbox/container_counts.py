"""What the kernel counted in a container, read from out here where the engine runs on this machine.

In: a container's id and the id of its first process. Out: `Counts`, cheap enough for every run: the files stay open. Waits for nothing.
"""

from __future__ import annotations

from pathlib import Path

from palestra.sandbox.meter import CountFiles

ROOT = Path("/sys/fs/cgroup")
V1 = (("memory", "memory.oom_control"), ("pids", "pids.events"), ("memory", "memory.max_usage_in_bytes"))
V2 = ("memory.events", "pids.events", "memory.peak")


class ContainerCounts(CountFiles):
    """Counts of one container."""

    @classmethod
    def of(cls, container: str, pid: int, *, proc: Path = Path("/proc"), root: Path = ROOT) -> ContainerCounts | None:
        """None where that process is not of this container here: the engine is on another machine, or sees other process ids."""
        files = cgroup_files(container, pid, proc, root)
        # The peak alone may be absent (kernels before 5.19).
        if not files or not all(path.exists() for path in files[:2]):
            return None
        try:
            return cls(*map(str, files))
        except OSError:
            return None


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
