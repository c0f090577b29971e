"""Advantages: what each rollout did better than its siblings. Pure functions over rows; numpy only.

In: the rows of one batch. Out: one `RowAdvantage` per row, or None where the rollout takes no part (no reward, or nothing left to train).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.server.types import TrainingSample
from palestra.trainer.types import RowAdvantage, TrainerError

Rollout = tuple[str, int]
"""rollout_id and attempt."""


def group_advantages(rows: Sequence[TrainingSample], *, std_normalise: bool) -> list[RowAdvantage | None]:
    """GRPO's outcome advantage (Shao et al. 2024, DeepSeekMath, section 4.1.2): the reward less the mean of its group.

    Each rollout counts once in the mean, however many rows it has; rollouts without a reward or without a trained token do not count.
    With `std_normalise` it is divided by the group's sample standard deviation (n - 1); a group of equal rewards gets 0. Groups are found
    by id, wherever their rows lie.

    Raises:
        TrainerError: rows of one rollout disagree about its reward or its group.
    """
    rewards = _rewards(rows)
    groups: dict[str, list[float]] = {}
    for (group, _), known in rewards.items():
        groups.setdefault(group, []).append(known)
    baselines = {group: (float(np.mean(values)), _std(values)) for group, values in groups.items()}
    out: list[RowAdvantage | None] = []
    for row in rows:
        reward = rewards.get((row.group_id, (row.rollout_id, row.attempt)))
        if reward is None:
            out.append(None)
            continue
        mean, std = baselines[row.group_id]
        value = reward - mean
        if std_normalise:
            value = value / std if std > 0 else 0.0
        out.append(RowAdvantage(row.rollout_id, row.branch, value, mean, std))
    return out


ESTIMATORS = {"grpo": group_advantages}
"""By the name that `algo.estimator` gives."""


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 and min(values) != max(values) else 0.0


def _rewards(rows: Sequence[TrainingSample]) -> dict[tuple[str, Rollout], float]:
    """Reward of each rollout that has one and that has at least one trained token in some row."""
    told: dict[Rollout, tuple[str, float | None]] = {}
    trained: set[Rollout] = set()
    for row in rows:
        rollout = (row.rollout_id, row.attempt)
        known = told.setdefault(rollout, (row.group_id, row.reward))
        if known != (row.group_id, row.reward):
            raise TrainerError(f"rows of rollout {row.rollout_id} disagree: {known} and {(row.group_id, row.reward)}")
        if row.loss_mask[1:].any():
            trained.add(rollout)
    return {
        (group, rollout): reward
        for rollout, (group, reward) in told.items()
        if reward is not None and rollout in trained
    }
