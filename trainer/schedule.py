"""Learning rates by step. Steps count from 1. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR = 0.1
"""What a cosine falls to, as a share of the full rate."""


def constant(step: int, lr: float, warmup: int) -> float:
    """Rises linearly over `warmup` steps, then stays."""
    return lr * min(1.0, step / warmup) if warmup else lr


def cosine(step: int, lr: float, warmup: int, total: int) -> float:
    """Rises linearly over `warmup` steps, then falls along a half cosine to a tenth at step `total`."""
    if step <= warmup:
        return constant(step, lr, warmup)
    done = (step - warmup) / max(1, total - warmup)
    return lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


SCHEDULES: dict[str, Callable[[int, float, int, int], float]] = {
    "constant": lambda step, lr, warmup, _total: constant(step, lr, warmup),
    "cosine": cosine,
}
"""By the name that a configuration gives: (step, full rate, warm-up steps, total steps) -> rate."""
