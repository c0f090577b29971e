"""The two charts of a report, as shapes for inline SVG: numbers go in, coordinates come out. Nothing is waited for.

One series each, so neither has a legend; values stand beside the marks, so neither needs a pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.agents.evaluation.summary import PassPoint

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 16, 20, 30
BINS = 10


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of the curve, with its error bar."""

    x: float
    y: float
    low: float
    high: float
    """Ends of the error bar: one standard error either way."""
    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Curve:
    """pass@k over k."""

    dots: tuple[Dot, ...]
    path: str
    """Points of the polyline."""
    grid: tuple[tuple[float, str], ...]
    """Lines across: y, label."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bin of the histogram."""

    x: float
    y: float
    width: float
    height: float
    label: str
    """Where the bin begins."""
    count: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Rewards."""

    bars: tuple[Bar, ...]
    last: str
    """Where the last bin ends."""


def pass_curve(points: Sequence[PassPoint]) -> Curve | None:
    """The curve, at equal steps for doubled k; None with fewer than two points."""
    known = [(point, point.at_least_one) for point in points if point.at_least_one is not None]
    if len(known) < 2:
        return None
    step = (WIDTH - LEFT - RIGHT) / (len(known) - 1)
    dots = []
    for at, (point, value) in enumerate(known):
        se = point.at_least_one_se or 0.0
        ends = (_height(max(0.0, value - se)), _height(min(1.0, value + se)))
        dots.append(Dot(round(LEFT + at * step, 1), _height(value), *ends, f"k={point.k}", f"{value:.2f}"))
    grid = tuple((_height(share), f"{share:g}") for share in (0.0, 0.5, 1.0))
    return Curve(tuple(dots), " ".join(f"{dot.x},{dot.y}" for dot in dots), grid)


def _height(share: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - share), 1)


def histogram(values: Sequence[float]) -> Histogram | None:
    """Ten bins from the smallest value (or 0) to the largest (or 1); None without values."""
    if not values:
        return None
    low, high = min(0.0, *values), max(1.0, *values)
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    slot = (WIDTH - LEFT - RIGHT) / BINS
    bars = []
    for at, count in enumerate(counts):
        height = (HEIGHT - TOP - BOTTOM) * count / max(counts)
        label = f"{low + at * (high - low) / BINS:.3g}"
        y = round(HEIGHT - BOTTOM - height, 1)
        bars.append(Bar(round(LEFT + at * slot + 1, 1), y, round(slot - 2, 1), round(height, 1), label, count))
    return Histogram(tuple(bars), f"{high:.3g}")
