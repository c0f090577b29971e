"""The advantages of one batch, as `[algo]` asks for them. Pure but for the import of a user's own function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from palestra.server.types import TrainingSample
from palestra.trainer.advantages.credit import rollouts_of, row_advantages
from palestra.trainer.advantages.estimators import ESTIMATORS, dr_grpo, grpo
from palestra.trainer.advantages.own import load_advantage, own_advantages
from palestra.trainer.config import AlgoConfig
from palestra.trainer.types import Estimator, RowAdvantage


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch."""

    rows: list[RowAdvantage | None]
    """Of each row, in the batch's order; None where its rollout takes no part (no reward, or nothing left to train)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """With `algo.turn_discount`: `train/turn_credit/untold`, rollouts whose turns cannot be told apart."""


def batch_advantages(rows: Sequence[TrainingSample], algo: AlgoConfig) -> Advantages:
    """What each row's rollout, or each of its turns, did better than the baseline.

    Groups are found by id, wherever their rows lie; each rollout counts once in every baseline, however many rows it has; rollouts without
    a reward or without a trained token do not count. With `algo.turn_discount` each turn has the discounted sum of what followed it, and
    is compared with the same turn of the others, or with the last one of those that had ended.

    Raises:
        TrainerError: rows of one rollout disagree about its reward or its group; or the user's own advantage does something else than it
            should.
    """
    if algo.advantage is not None:
        return Advantages(own_advantages(algo.advantage, load_advantage(algo.advantage), rows))
    estimator = ESTIMATORS[algo.estimator]
    if algo.estimator == "grpo" and not algo.std_normalise:
        estimator = dr_grpo
    rollouts = rollouts_of(rows, algo.turn_discount)
    found = row_advantages(rows, rollouts, estimator(rollouts.returns, rollouts.groups))
    if algo.turn_discount is None:
        return Advantages(found)
    return Advantages(found, {"train/turn_credit/untold": float(len(rollouts.lines) - len(rollouts.runs))})


def group_advantages(rows: Sequence[TrainingSample], *, std_normalise: bool) -> list[RowAdvantage | None]:
    """GRPO's outcome advantage of each row; without `std_normalise` that of Dr. GRPO.

    Raises:
        TrainerError: rows of one rollout disagree about its reward or its group.
    """
    estimator: Estimator = grpo if std_normalise else dr_grpo
    rollouts = rollouts_of(rows)
    return row_advantages(rows, rollouts, estimator(rollouts.returns, rollouts.groups))
