"""Advantages of rollouts as arithmetic on arrays: what each did better than a baseline says. Pure functions, each with its source.

In: returns [N, K], a line per rollout and a column per turn (K is 1 where credit is not told apart by turns), and the group of each line.
Out: an `Estimate` of the same shape. Columns are independent of each other, and each rollout counts once in every mean and deviation.

Deviations are those of a sample (n - 1). Where all values are equal, or there is but one, the deviation is 0 and nothing is divided: the
advantage there is exactly 0, not the rest of a rounded sum made large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from palestra.trainer.types import F64, I64, Estimate, Estimator

_EQUAL = 1e-9
"""Rewards that differ by less are equal, as for the plan that drops groups of equal rewards."""


def grpo(returns: F64, groups: I64) -> Estimate:
    """(r - mean) / std, both of the group (Shao et al. 2024, DeepSeekMath, section 4.1.2)."""
    plain = dr_grpo(returns, groups)
    return Estimate(_divided(plain.values, plain.std), plain.baseline, plain.std)


def dr_grpo(returns: F64, groups: I64) -> Estimate:
    """r - mean of the group. The division by the deviation would give very easy and very hard tasks more weight (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3.2)."""
    return Estimate(
        _per_group(returns, groups, _centred),
        _per_group(returns, groups, _mean),
        _per_group(returns, groups, _deviation),
    )


def rloo(returns: F64, groups: I64) -> Estimate:
    """r less the mean of the group's others (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics", section 2.2). A rollout without
    siblings is its own baseline."""
    baseline = _per_group(returns, groups, _mean_of_others)
    return Estimate(
        _per_group(returns, groups, lambda own: _centred(own) * (len(own) / max(1, len(own) - 1))),
        baseline,
        _per_group(returns, groups, _deviation),
    )


def reinforce(returns: F64, groups: I64) -> Estimate:
    """r itself (Williams 1992)."""
    return Estimate(returns.copy(), np.zeros_like(returns), np.zeros_like(returns))


def reinforce_pp(returns: F64, groups: I64) -> Estimate:
    """(r - mean) / std, both of the whole batch: no task's few rollouts make a baseline of their own (Hu 2025, "REINFORCE++", section 3).
    The batch is what is trained in one step of the run; the original counts tokens in it, here each rollout counts once."""
    batch = np.zeros_like(groups)
    std = _per_group(returns, batch, _deviation)
    return Estimate(_divided(_per_group(returns, batch, _centred), std), _per_group(returns, batch, _mean), std)


def reinforce_pp_baseline(returns: F64, groups: I64) -> Estimate:
    """r less the mean of the group, divided by the batch's deviation of such differences (Hu 2025, "REINFORCE++", the variant with a
    baseline). Their mean over the batch is 0 already."""
    values = _per_group(returns, groups, _centred)
    std = _per_group(values, np.zeros_like(groups), _deviation)
    return Estimate(_divided(values, std), _per_group(returns, groups, _mean), std)


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
"""By the name that `algo.estimator` gives."""


def gae(rewards: F64, values: F64, *, discount: float, trace: float, last_value: float = 0.0) -> tuple[F64, F64]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): (advantages [T], returns [T], what a critic learns).

    Args:
        rewards: [T] of each step of one episode.
        values: [T] a critic's value before each step.
        discount: gamma, of what comes later.
        trace: lambda; 0 trusts the critic from the next step on, 1 not at all.
        last_value: the critic's value after the last step; 0 where the episode ended there, and was not cut.

    Raises:
        ValueError: not one value per reward.
    """
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape} must be of one length")
    following = np.append(values[1:], last_value)
    surprises = rewards + discount * following - values
    advantages = np.zeros(len(rewards), dtype=np.float64)
    later = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        later = float(surprises[t]) + discount * trace * later
        advantages[t] = later
    return advantages, advantages + values


def _per_group(returns: F64, groups: I64, of: Callable[[F64], F64]) -> F64:
    """[N, K]: `of` applied to the lines of each group; it gives a value per line, or one line for all of them."""
    out = np.empty_like(returns)
    for group in np.unique(groups):
        own = groups == group
        out[own] = of(returns[own])
    return out


def _mean(own: F64) -> F64:
    return np.asarray(own.mean(axis=0, keepdims=True), dtype=np.float64)


def _mean_of_others(own: F64) -> F64:
    return (own.sum(axis=0) - own) / (len(own) - 1) if len(own) > 1 else own


def _centred(own: F64) -> F64:
    return np.where(_equal(own), 0.0, own - _mean(own))


def _deviation(own: F64) -> F64:
    if len(own) < 2:
        return np.zeros_like(own)
    return np.where(_equal(own), 0.0, own.std(axis=0, ddof=1, keepdims=True))


def _equal(own: F64) -> NDArray[np.bool_]:
    return np.asarray(own.max(axis=0, keepdims=True) - own.min(axis=0, keepdims=True) < _EQUAL, dtype=np.bool_)


def _divided(values: F64, std: F64) -> F64:
    return np.divide(values, std, out=np.zeros_like(values), where=std > 0)
