"""The statistics of an evaluation. Pure functions of numbers; nothing is read, nothing waits.

Rollouts of one task are not independent: errors are clustered by task, and resampling draws whole tasks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
"""Draws of a bootstrap."""
PERMUTATIONS = 20_000
"""Draws of a permutation test that is too large to be exact."""
EXACT_TASKS = 14
"""Up to so many tasks all 2^n signs are tried."""
_CHUNK = 1 << 22
"""Numbers that are held at once."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval at a level of confidence."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether `value` lies in it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and how sure it is."""

    mean: float | None
    """None: there was nothing to average."""
    se: float | None
    """Standard error, clustered; None with fewer than two tasks."""
    interval: Interval | None
    """95%; None with fewer than two tasks."""
    n: int
    """Values that went in."""


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference of two evaluations on the same tasks: second minus first."""

    tasks: int
    mean: float | None
    se: float | None
    interval: Interval | None
    p: float | None
    """Two-sided, of a sign-flip permutation test; None with fewer than two tasks."""


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of k samples is right, where c of n were: unbiased (Chen et al. 2021). None for k > n: that cannot be
    estimated.

    Raises:
        ValueError: counts that cannot be.
    """
    _check_counts(n, c, k)
    if k > n:
        return None
    return 1.0 if n - c < k else 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """The chance that all of k samples are right (pass^k), where c of n were; unbiased, None for k > n.

    Raises:
        ValueError: counts that cannot be.
    """
    _check_counts(n, c, k)
    return None if k > n else math.prod((c - i) / (n - i) for i in range(k)) if c >= k else 0.0


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k needs 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}")


def grouped(rows: Sequence[tuple[Hashable, float]]) -> dict[Hashable, list[float]]:
    """Values by task, in the order in which tasks appear."""
    by: dict[Hashable, list[float]] = defaultdict(list)
    for task, value in rows:
        by[task].append(value)
    return dict(by)


def clustered(rows: Sequence[tuple[Hashable, float]]) -> tuple[float | None, float | None]:
    """The mean over all values, and its standard error with tasks as clusters (Miller 2024), with the factor G/(G-1) for few clusters.
    The error is None with fewer than two tasks.
    """
    by = list(grouped(rows).values())
    if not rows:
        return None, None
    mean = math.fsum(value for _, value in rows) / len(rows)
    if len(by) < 2:
        return mean, None
    squares = math.fsum(math.fsum(value - mean for value in values) ** 2 for values in by)
    return mean, math.sqrt(len(by) / (len(by) - 1) * squares) / len(rows)


def bootstrap(
    rows: Sequence[tuple[Hashable, float]], *, draws: int = RESAMPLES, level: float = 0.95, seed: int = 0
) -> Interval | None:
    """Percentile interval of the mean: as many tasks as there are, drawn with replacement, each with all of its values. None with fewer
    than two tasks.
    """
    by = list(grouped(rows).values())
    if len(by) < 2:
        return None
    sums = np.array([math.fsum(values) for values in by])
    counts = np.array([len(values) for values in by], dtype=np.float64)
    rng = np.random.default_rng(seed)
    means: list[Floats] = []
    for draw in _chunks(draws, len(by)):
        chosen = rng.integers(len(by), size=(draw, len(by)))
        means.append(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def estimate(rows: Sequence[tuple[Hashable, float]]) -> Estimate:
    """Mean, clustered error and bootstrap interval of (task, value) pairs."""
    mean, se = clustered(rows)
    return Estimate(mean, se, bootstrap(rows), len(rows))


def paired(first: Mapping[Hashable, float], second: Mapping[Hashable, float], *, seed: int = 0) -> Paired:
    """Compares the means per task of two evaluations, task by task. Tasks that only one has are left out."""
    differences = np.array([second[task] - first[task] for task in first if task in second], dtype=np.float64)
    count = len(differences)
    if count < 2:
        return Paired(count, float(differences[0]) if count else None, None, None, None)
    mean = float(differences.mean())
    se = float(differences.std(ddof=1) / math.sqrt(count))
    interval = bootstrap(list(enumerate(differences.tolist())), seed=seed)
    return Paired(count, mean, se, interval, permutation_p(differences.tolist(), seed=seed))


def permutation_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of the mean difference, if the sign of each task's difference were chance. Exact for few tasks; else the share of random
    sign flips that do as well, the observed one counted, so it is never 0.
    """
    values = np.array([value for value in differences if value != 0.0], dtype=np.float64)
    if not len(values):
        return 1.0
    # A sum that is equal but for rounding counts as equal.
    reached = abs(float(values.sum())) - 1e-12 * float(np.abs(values).sum())
    if len(values) <= EXACT_TASKS:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
        return float(np.mean(np.abs(signs @ values) >= reached))
    rng, hits = np.random.default_rng(seed), 0
    for draw in _chunks(PERMUTATIONS, len(values)):
        signs = rng.integers(0, 2, size=(draw, len(values))) * 2.0 - 1.0
        hits += int(np.count_nonzero(np.abs(signs @ values) >= reached))
    return (1 + hits) / (1 + PERMUTATIONS)


def _chunks(draws: int, width: int) -> list[int]:
    """`draws` in pieces, so that memory stays bounded for many tasks."""
    size = max(1, _CHUNK // max(1, width))
    return [min(size, draws - start) for start in range(0, draws, size)]
