"""Names of the plan's own groups: `g` and the ordinal of its draw, and from the second life on a dot and its number.

A group whose weights were abandoned by a restore is dropped, and its task is owed: it lives again under the next name. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PLANNED = re.compile(r"g(\d{6,})(?:\.([1-9]\d*))?")


def name_of(draw: int, life: int = 0) -> str:
    """The name of a draw's group; `life` counts from 0."""
    return f"g{draw:06d}.{life}" if life else f"g{draw:06d}"


def draw_of(group_id: str) -> tuple[int, int] | None:
    """(draw, life) that a name stands for; None for a group that is not the plan's own."""
    found = PLANNED.fullmatch(group_id)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def owed(lost: Iterable[str], known: Iterable[str]) -> list[tuple[int, int]]:
    """(draw, next life) of each draw whose newest group is among the lost, in the order of draws."""
    newest: dict[int, int] = {}
    for found in map(draw_of, known):
        if found is not None:
            newest[found[0]] = max(found[1], newest.get(found[0], 0))
    pairs = {found for found in map(draw_of, lost) if found is not None}
    return sorted((draw, life + 1) for draw, life in pairs if newest.get(draw, life) == life)
