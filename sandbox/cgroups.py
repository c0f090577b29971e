"""Control groups: limits that the kernel holds on all processes of a box together, and what it counted. Versions 1 and 2.

In: the mounts of this machine. Out: a group per box, `palestra-sandbox/OWNER/NUMBER` below a folder that this user may write, and its
figures. Loads nothing heavy: the keeper runs it. Waits for nothing.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from palestra.sandbox.keeper.owners import is_name

NAME = "palestra-sandbox"
WANTED = ("memory", "pids", "cpu")
PERIOD_US = 100_000
"""Over which CPU time is counted."""
GONE = (errno.ENOENT, errno.ENODEV)
"""A group that was removed, before or while it was read."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups can be made."""

    version: int
    bases: tuple[tuple[str, str], ...]
    """Controller and folder. Of version 2 all have the same folder."""

    @property
    def controllers(self) -> frozenset[str]:
        """What can be limited."""
        return frozenset(controller for controller, _ in self.bases)

    def folders(self, *parts: str) -> list[str]:
        """The folders of an owner or a box, one per mount."""
        return list(dict.fromkeys(os.path.join(base, NAME, *parts) for _, base in self.bases))

    def folder(self, controller: str, *parts: str) -> str | None:
        """The folder in which this controller's files are."""
        base = dict(self.bases).get(controller)
        return None if base is None else os.path.join(base, NAME, *parts)


def find(mountinfo: str | None = None, own: str | None = None) -> tuple[Hierarchy | None, str]:
    """Where this process may make groups, and why there is nothing, or not everything. `mountinfo` and `own` are the texts of
    /proc/self/mountinfo and /proc/self/cgroup."""
    one, two = _mounts(mountinfo if mountinfo is not None else _read("/proc/self/mountinfo"))
    own_group = own if own is not None else _read("/proc/self/cgroup")
    reasons = []
    if "memory" in one:
        found, why = _version_1(one)
        if found is not None:
            return found, why
        reasons.append(why)
    if two:
        found, why = _version_2(two, own_group)
        if found is not None:
            return found, why
        reasons.append(why)
    return None, "; ".join(reasons) or "no cgroup file system with the memory controller is mounted"


def _mounts(mountinfo: str) -> tuple[dict[str, str], str]:
    """Version 1 mount points by controller, and version 2's."""
    one: dict[str, str] = {}
    two = ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point, kind = left.split()[4], right.split()
        if kind[0] == "cgroup":
            one.update({name: point for name in kind[2].split(",") if name in WANTED})
        elif kind[0] == "cgroup2":
            two = two or point
    return one, two


def _version_1(mounts: dict[str, str]) -> tuple[Hierarchy | None, str]:
    bases, refused = [], []
    for controller in WANTED:
        point = mounts.get(controller)
        if point is not None and os.access(point, os.W_OK):
            bases.append((controller, point))
        else:
            refused.append(f"{point} is not writable" if point else f"the {controller} controller is not mounted")
    if ("memory", mounts["memory"]) not in bases:
        return None, "; ".join(refused)
    return Hierarchy(1, tuple(bases)), "; ".join(refused)


def _version_2(point: str, own: str) -> tuple[Hierarchy | None, str]:
    reasons = []
    for base in _candidates(point, own):
        if not all(os.access(path, os.W_OK) for path in (base, f"{base}/cgroup.procs")):
            continue
        try:
            _hand_down(base)
            os.makedirs(f"{base}/{NAME}", exist_ok=True)
            _hand_down(f"{base}/{NAME}")
        except OSError as error:
            reasons.append(f"{error.filename or base}: {error.strerror}")
            continue
        have = _read(f"{base}/{NAME}/cgroup.subtree_control").split()
        held = tuple((name, base) for name in WANTED if name in have)
        if "memory" in have:
            missing = [name for name in WANTED if name not in have]
            return Hierarchy(2, held), f"not delegated: {', '.join(missing)}" if missing else ""
        reasons.append(f"{base}: the memory controller is not delegated")
    return None, "; ".join(reasons) or f"no group below {point} is writable for this user"


def _candidates(point: str, own: str) -> Iterator[str]:
    """The mount's root, then the groups above our own, from the top: what is delegated to a user begins somewhere on that way."""
    yield point
    mine = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")
    at = point
    for part in mine.strip("/").split("/")[:-1]:
        at = os.path.join(at, part)
        if os.path.isdir(at):
            yield at


def _hand_down(folder: str) -> None:
    """Lets the groups below have controllers.

    Raises:
        OSError: the kernel refuses, such as for a group that has processes of its own.
    """
    have = _read(f"{folder}/cgroup.subtree_control").split()
    offered = _read(f"{folder}/cgroup.controllers").split()
    for name in WANTED:
        if name in offered and name not in have:
            write(f"{folder}/cgroup.subtree_control", f"+{name}")


def make(where: Hierarchy, owner: str, box: str, *, memory: int, pids: int, cpus: float) -> list[str]:
    """A group with these limits (bytes, processes and threads, CPU time per time); its folders.

    Raises:
        OSError: it cannot be made.
    """
    for folder in where.folders(owner):
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            if where.version == 2:
                _hand_down(folder)
    made: list[str] = []
    try:
        for folder in where.folders(owner, box):
            os.mkdir(folder)
            made.append(folder)
        for path, value in _settings(where, owner, box, memory, pids, cpus):
            write(path, value)
    except OSError:
        remove(made)
        raise
    return made


def _settings(where: Hierarchy, owner: str, box: str, memory: int, pids: int, cpus: float) -> Iterator[tuple[str, str]]:
    first = where.version == 1
    if folder := where.folder("memory", owner, box):
        yield f"{folder}/{'memory.limit_in_bytes' if first else 'memory.max'}", str(memory)
        # A machine that does not account swap has no such file.
        swap = f"{folder}/{'memory.memsw.limit_in_bytes' if first else 'memory.swap.max'}"
        if os.path.exists(swap):
            yield swap, str(memory) if first else "0"
        if not first and os.path.exists(f"{folder}/memory.oom.group"):
            yield f"{folder}/memory.oom.group", "0"
    if folder := where.folder("pids", owner, box):
        yield f"{folder}/pids.max", str(pids)
    # More than the machine has needs no limit.
    if (folder := where.folder("cpu", owner, box)) and cpus < (os.cpu_count() or 1):
        quota = max(1000, int(cpus * PERIOD_US))
        if first:
            yield f"{folder}/cpu.cfs_period_us", str(PERIOD_US)
            yield f"{folder}/cpu.cfs_quota_us", str(quota)
        else:
            yield f"{folder}/cpu.max", f"{quota} {PERIOD_US}"


def enter(folders: Iterable[str]) -> None:
    """Puts this process into a group.

    Raises:
        OSError: it cannot.
    """
    for folder in folders:
        write(f"{folder}/cgroup.procs", "0")


def members(folders: Iterable[str]) -> set[int]:
    """Processes in a group, zombies not among them."""
    found: set[int] = set()
    for folder in folders:
        try:
            found.update(int(pid) for pid in _read(f"{folder}/cgroup.procs").split() if pid != "0")
        except OSError as error:
            if error.errno not in GONE:
                raise
    return found


def kill(folders: list[str]) -> bool:
    """Kills what is in a group; whether there was anything."""
    for folder in folders:
        # Who kills one by one must not be outrun by forks.
        for name, value in (("cgroup.kill", "1"), ("pids.max", "0")):
            if os.path.exists(f"{folder}/{name}"):
                write(f"{folder}/{name}", value)
                break
    found = members(folders)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(found)


def remove(folders: list[str]) -> bool:
    """Removes a group; whether it is gone. A group whose last process is just ending is not yet."""
    gone = True
    for folder in folders:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def owners(where: Hierarchy) -> set[str]:
    """Owners that have groups here."""
    return _below(where.folders())


def boxes(where: Hierarchy, owner: str) -> set[str]:
    """Boxes of an owner."""
    return _below(where.folders(owner))


def _below(folders: list[str]) -> set[str]:
    found: set[str] = set()
    for folder in folders:
        try:
            found.update(entry.name for entry in os.scandir(folder) if entry.is_dir())
        except FileNotFoundError:  # not made yet, or another process has just cleared it
            continue
    return found


def clear(where: Hierarchy, owner: str, pause: Callable[[], None], tries: int = 500) -> int:
    """Kills and removes all groups of an owner that is gone; how many boxes that were. `pause` is called while processes end.

    Raises:
        OSError: some do not end.
        ValueError: no owner of ours: nothing is touched.
    """
    if not is_name(owner):
        raise ValueError(f"{owner!r} is no owner of boxes")
    left = boxes(where, owner)
    count = len(left)
    for _ in range(tries):
        for box in sorted(left):
            folders = where.folders(owner, box)
            kill(folders)
            if remove(folders):
                left.discard(box)
        if not left and remove(where.folders(owner)):
            return count
        pause()
    raise OSError(f"groups of {owner} cannot be removed: {', '.join(sorted(left)[:5]) or 'the owner itself'}")


def write(path: str, text: str) -> None:
    """Writes a kernel file.

    Raises:
        OSError: the kernel refuses.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
