"""The statistics of an evaluation: golden values, simulations, and what cannot be estimated."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.agents.evaluation.stats import (
    bootstrap,
    clustered,
    estimate,
    paired,
    pass_at_k,
    pass_hat_k,
    permutation_p,
)
from palestra.agents.evaluation.summary import ks_of, pass_points, quantile


@pytest.mark.parametrize(
    ("n", "c", "k", "at_least_one", "all_right"),
    [
        (10, 3, 5, 11 / 12, 0.0),
        (10, 3, 1, 0.3, 0.3),
        (5, 5, 5, 1.0, 1.0),
        (5, 0, 3, 0.0, 0.0),
        (4, 2, 2, 5 / 6, 1 / 6),
        (8, 7, 4, 1.0, 0.5),
        (5, 0, 10, None, None),
        (5, 5, 6, None, None),
    ],
)
def test_pass_at_k_and_pass_hat_k_by_hand(
    n: int, c: int, k: int, at_least_one: float | None, all_right: float | None
) -> None:
    assert pass_at_k(n, c, k) == (None if at_least_one is None else pytest.approx(at_least_one))
    assert pass_hat_k(n, c, k) == (None if all_right is None else pytest.approx(all_right))


@given(st.integers(1, 9), st.data())
@settings(max_examples=30, deadline=None)
def test_both_are_the_shares_over_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(subset) for subset in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_hat_k(n, c, k)


def test_clustered_errors_by_hand() -> None:
    """Two tasks, (1, 1) and (0, 0): mean 0.5, squares of the sums 1 + 1, factor 2/1, over 4 values."""
    assert clustered([("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 0.0)]) == (0.5, pytest.approx(math.sqrt(2 * 2) / 4))
    # One value per task: the textbook error of a mean.
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    assert clustered(list(enumerate(values)))[1] == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))


def test_rollouts_of_one_task_do_not_count_as_independent() -> None:
    rng = random.Random(0)
    rows = [
        (task, float(rng.random() < p))
        for task, p in enumerate(rng.betavariate(0.5, 0.5) for _ in range(50))
        for _ in range(8)
    ]
    mean, se = clustered(rows)
    assert mean is not None
    naive = math.sqrt(mean * (1 - mean) / len(rows))
    assert se is not None
    assert se > 1.4 * naive


def test_one_task_or_none_has_no_error_and_no_interval() -> None:
    assert clustered([]) == (None, None)
    assert clustered([("a", 1.0), ("a", 0.0)]) == (0.5, None)
    assert bootstrap([]) is None
    assert bootstrap([("a", 1.0), ("a", 0.0)]) is None
    assert estimate([]).mean is None


def test_the_bootstrap_draws_as_many_tasks_as_there_are_with_replacement() -> None:
    """Its spread is that of the mean of G draws: half of them, or none twice, would give another one."""
    rng = random.Random(1)
    rows = [(task, rng.random()) for task in range(40)]
    interval, again = bootstrap(rows, draws=4000), bootstrap(rows, draws=4000)
    assert interval == again
    assert interval is not None
    values = [value for _, value in rows]
    expected = 2 * 1.96 * float(np.std(values)) / math.sqrt(40)
    assert interval.high - interval.low == pytest.approx(expected, rel=0.08)
    assert interval.holds(sum(values) / 40)
    assert not interval.holds(1.0)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """100 evaluations of 30 tasks x 2 whose true mean is 0.4."""
    rng, held = np.random.default_rng(3), 0
    for trial in range(100):
        chances = rng.beta(0.8, 1.2, size=30)
        rows = [(task, float(rng.random() < p)) for task, p in enumerate(chances) for _ in range(2)]
        interval = bootstrap(rows, draws=300, seed=trial)
        assert interval is not None
        held += interval.holds(0.4)
    assert 0.88 <= held / 100 <= 0.99


def test_pairing_by_hand() -> None:
    first = {"a": 0.0, "b": 0.5, "c": 1.0, "only here": 1.0}
    second = {"a": 0.5, "b": 0.5, "c": 1.0, "d": 0.0}
    difference = paired(first, second)
    assert (difference.tasks, difference.mean) == (3, pytest.approx(1 / 6))
    assert difference.se == pytest.approx(np.std([0.5, 0.0, 0.0], ddof=1) / math.sqrt(3))
    assert difference.p == 1.0
    assert paired({"a": 1.0}, {"a": 0.0}).p is None
    assert paired({"a": 1.0}, {"b": 0.0}).mean is None


def test_permutation_p_is_exact_for_few_tasks_and_near_it_for_many() -> None:
    assert permutation_p([1.0] * 5) == pytest.approx(2 / 32)
    assert permutation_p([0.1, 0.2, -0.3]) == 1.0, "equal sums count although 0.1 + 0.2 is no exact 0.3"
    assert permutation_p([0.0, 0.0]) == 1.0
    # 15 tasks, one of them worse: two-sided binomial chance of at most one.
    assert permutation_p([1.0] * 14 + [-1.0]) == pytest.approx(2 * 16 / 2**15, abs=6e-4)
    assert permutation_p([1.0] * 60) == pytest.approx(1 / 20_001)


def test_equal_evaluations_are_rarely_called_different() -> None:
    rng, found = np.random.default_rng(5), 0
    for trial in range(100):
        found += permutation_p(rng.normal(size=9).tolist(), seed=trial) <= 0.05
    assert found / 100 <= 0.1


def test_the_ks_of_a_table_and_tasks_with_too_few_episodes() -> None:
    assert (ks_of(1), ks_of(4), ks_of(10)) == ([1], [1, 2, 4], [1, 2, 4, 8, 10])
    points = pass_points([("a", 1.0), ("a", 0.0), ("a", 0.0), ("b", 1.0)], 4)
    assert [(point.k, point.tasks) for point in points] == [(1, 2), (2, 1), (4, 0)]
    assert points[0].at_least_one == pytest.approx((1 / 3 + 1) / 2)
    assert points[1].at_least_one == pytest.approx(2 / 3)
    assert (points[2].at_least_one, points[2].all_right) == (None, None)


def test_quantiles_are_values_that_occurred() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(range(1, 101)), 0.95) == 95
    assert quantile([], 0.5) is None
