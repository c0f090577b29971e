"""Which task the n-th group plays. The same seed gives the same order, so a resumed run goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class TaskOrder:
    """Draws 0, 1, 2, ... over tasks: epoch after epoch, by weight, or one after the other without end."""

    def __init__(self, count: int | None, *, shuffle: bool, seed: int, weights: Sequence[float] | None = None) -> None:
        """`count` None: there is no end, and draw n is task n.

        Raises:
            ValueError: there are no tasks, or weights that fit none.
        """
        if count is not None and count < 1:
            raise ValueError("there are no tasks to play: the environment's task source is empty")
        self.count, self.shuffle, self.seed = count, shuffle, seed
        self._epoch = -1
        self._permutation: list[int] = []
        self._ends: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        if weights is not None:
            self.weigh(weights)

    def weigh(self, weights: Sequence[float]) -> None:
        """From now on each draw takes a task by its share of all weights, whatever was drawn before.

        Raises:
            ValueError: not one weight per task, a negative or infinite one, or all 0.
        """
        if self.count is None:
            raise ValueError("weights are of tasks that can be counted; this source has no end")
        if len(weights) != self.count:
            raise ValueError(f"{len(weights)} weights for {self.count} tasks: give one per task")
        if bad := [at for at, weight in enumerate(weights) if not (math.isfinite(weight) and weight >= 0)]:
            raise ValueError(f"the weight of task {bad[0]} is {weights[bad[0]]}: it must be a number of at least 0")
        ends = np.cumsum(np.asarray(weights, np.float64))
        if ends[-1] <= 0:
            raise ValueError("all weights are 0: no task would ever be drawn")
        self._ends = ends / ends[-1]

    def index(self, draw: int) -> int:
        """The task of draw `draw`; without weights each epoch visits every task once."""
        if self.count is None:
            return draw
        if self._ends is not None:
            at = np.random.default_rng([self.seed, draw, 1]).random()
            return int(np.searchsorted(self._ends, at, side="right"))
        epoch, at = divmod(draw, self.count)
        if not self.shuffle:
            return at
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation, self._epoch = generator.permutation(self.count).tolist(), epoch
        return self._permutation[at]
