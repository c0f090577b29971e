"""What a test's process holds of this machine: to be compared before and after.

Only what is this process's own is looked at, since others may use the machine at the same time.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holdings:
    processes: int
    """That descend from this one."""
    descriptors: Counter[str]
    """Of this process, by kind."""
    cgroups: int
    """Folders of boxes below owners that are this process or descend from it."""
    mounts: int
    """On this machine, with our name in them."""
    folders: int
    """Of boxes, in the folder for temporary things."""


def differences(before: Holdings, after: Holdings, connections: int = 0) -> list[str]:
    """What is held more or less than before; so many sockets more are a pool's, kept for the next call."""
    found = [
        f"{name}: {was} before, {now} after"
        for name in ("processes", "cgroups", "mounts", "folders")
        if (was := getattr(before, name)) != (now := getattr(after, name))
    ]
    kinds = {*before.descriptors, *after.descriptors}
    for kind in sorted(kinds):
        was, now = before.descriptors[kind], after.descriptors[kind]
        if was != now and not (kind == "socket" and connections and now <= was + connections):
            found.append(f"descriptors of {kind}: {was} before, {now} after")
    return found


def grown(before: Holdings, after: Holdings) -> list[str]:
    """What is held more than before. Less is no leak: what earlier tests had left may have gone meanwhile."""
    found = [
        f"{name}: {was} before, {now} after"
        for name in ("processes", "cgroups", "mounts", "folders")
        if (was := getattr(before, name)) < (now := getattr(after, name))
    ]
    more = after.descriptors - before.descriptors
    return found + [f"descriptors of {kind}: {count} more" for kind, count in sorted(more.items())]


def holdings() -> Holdings:
    """As it stands, without what nobody can reach any more."""
    gc.collect()
    mine = descendants()
    return Holdings(
        len(mine), _descriptors(), _cgroups({os.getpid(), *mine}), _mounts(), _folders({os.getpid(), *mine})
    )


def descendants() -> set[int]:
    """Processes that descend from this one and have not ended."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        grew = bool(more)
        found |= more
    return found - {os.getpid()}


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
        except OSError:  # the listing's own
            continue
    return found


def _cgroups(owners: set[int]) -> int:
    count = 0
    for root in Path("/sys/fs/cgroup").glob("**/palestra-sandbox"):
        for owner in root.iterdir():
            if owner.is_dir() and _service(owner.name) in owners:
                count += sum(1 for path in owner.iterdir() if path.is_dir())
    return count


def _service(owner: str) -> int:
    """The process that an owner's name says (see `keeper.owners`); 0 where it says none."""
    parts = owner.split("-")
    return int(parts[1]) if len(parts) == 5 and parts[1].isdigit() else 0


def _mounts() -> int:
    return sum("palestra" in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _folders(owners: set[int]) -> int:
    count = 0
    for root in Path("/tmp").glob(f"palestra-boxes-{os.getuid()}"):
        for owner in root.iterdir():
            if _service(owner.name) in owners:
                count += sum(1 for _ in owner.iterdir())
    return count
