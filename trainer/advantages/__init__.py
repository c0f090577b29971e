"""Advantages: what each rollout, or each of its turns, did better than others. Pure functions over rows; numpy only.

In: the rows of one batch. Out: one `RowAdvantage` per row, or None where the rollout takes no part.

`estimators` is the arithmetic, `credit` makes rollouts of rows and rows of rollouts, `own` finds an advantage of the user's, `batch` puts
them together.
"""

from palestra.trainer.advantages.batch import Advantages, batch_advantages, group_advantages
from palestra.trainer.advantages.estimators import ESTIMATORS, gae

__all__ = ["ESTIMATORS", "Advantages", "batch_advantages", "gae", "group_advantages"]
