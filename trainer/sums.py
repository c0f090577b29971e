"""What a loss summed up, added together: over micro-batches, ranks and updates. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def add_sums(sums: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds `more` into `sums`; of names that begin with `max_` the larger value stays."""
    for name, value in more.items():
        known = sums.get(name)
        if known is None:
            sums[name] = value
        else:
            sums[name] = max(known, value) if name.startswith("max_") else known + value
