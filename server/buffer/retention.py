"""How long arrays stay that no restore can need: a policy of age and size, the same for every store.

In: what lies on each shelf (what is deleted together: a segment file, or one group), and the policy. Out: the names of the shelves to
clear. Pure functions; nothing is waited for. Arrays that a restore may need are never named, whatever the policy says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from palestra.server.buffer.types import GroupEntry
from palestra.server.types import GroupState


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of arrays that no kept checkpoint needs. Without arguments: they go at once."""

    keep_s: float = 0.0
    """How long they stay after they were first found to be free, seconds."""
    keep_bytes: int | None = None
    """Of these, the oldest go before their time while all arrays, needed ones too, take more than this; None: time alone says."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Arrays that are deleted together."""

    name: str
    bytes: int
    """Of all arrays on it."""
    free_at: float | None
    """Since when no restore can need any of them, Unix seconds; None: one of them may be needed."""


def unwanted(shelves: Sequence[Shelf], retention: Retention, now: float) -> list[str]:
    """The shelves to clear, of `shelves` in the order in which they were filled."""
    free = [shelf for shelf in shelves if shelf.free_at is not None]
    gone = {shelf.name for shelf in free if now - (shelf.free_at or 0.0) >= retention.keep_s}
    if retention.keep_bytes is not None:
        total = sum(shelf.bytes for shelf in shelves if shelf.name not in gone)
        for shelf in free:
            if total <= retention.keep_bytes:
                break
            if shelf.name not in gone:
                gone.add(shelf.name)
                total -= shelf.bytes
    return [shelf.name for shelf in free if shelf.name in gone]


def is_free(entry: GroupEntry, oldest_kept_train_step: int) -> bool:
    """Whether no restore to a kept checkpoint can need the arrays of a group."""
    if entry.state == GroupState.COMMITTED:
        return entry.step is not None and entry.step <= oldest_kept_train_step
    return entry.state == GroupState.DROPPED


def shelves_of(entries: Iterable[GroupEntry], oldest_kept_train_step: int, now: float) -> list[Shelf]:
    """The shelves as `collect` would see them at `now`, from what a reader knows of each group."""
    sizes: dict[str, int] = {}
    since: dict[str, float] = {}
    for entry in entries:
        if entry.shelf is None:
            continue
        free_at = (
            (now if entry.free_at is None else entry.free_at) if is_free(entry, oldest_kept_train_step) else math.inf
        )
        sizes[entry.shelf] = sizes.get(entry.shelf, 0) + entry.stored_bytes
        since[entry.shelf] = max(since.get(entry.shelf, -math.inf), free_at)
    return [Shelf(name, sizes[name], None if since[name] == math.inf else since[name]) for name in sizes]
