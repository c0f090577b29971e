"""What killed owners left on this machine: groups, with what still runs in them, and folders. Blocks while processes end."""

from __future__ import annotations

import time

from palestra.sandbox import cgroups
from palestra.sandbox.keeper import folders, owners


def reap() -> int:
    """Removes what dead owners left; how many boxes that were.

    Raises:
        OSError: something cannot be removed.
    """
    where, _ = cgroups.find()
    base = folders.base()
    dead = [owner for owner in cgroups.owners(where) if owners.dead(owner)] if where is not None else []
    return clear(where, base, [*dead, *(owner for owner in folders.forsaken(base) if owner not in dead)])


def clear(where: cgroups.Hierarchy | None, base: str | None, names: list[str]) -> int:
    """Removes what these owners left, who are known to be gone; how many boxes that were. `base` is where folders are.

    Raises:
        OSError: something cannot be removed.
    """
    count = 0
    for owner in filter(None, names):
        left = cgroups.clear(where, owner, _pause) if where is not None else 0
        count += max(left, folders.remove(base, owner) if base else 0)
    return count


def _pause() -> None:
    time.sleep(0.01)  # in a thread of its own, while the kernel ends what was killed
