"""Which task the n-th group plays. Pure: the same seed gives the same order, so a resumed run goes on where it stopped."""

from __future__ import annotations

import numpy as np


class TaskOrder:
    """Draws 0, 1, 2, ... over `count` tasks, epoch after epoch."""

    def __init__(self, count: int, *, shuffle: bool, seed: int) -> None:
        if count < 1:
            raise ValueError("there are no tasks to play: the environment's task source is empty")
        self.count, self.shuffle, self.seed = count, shuffle, seed
        self._epoch = -1
        self._permutation: list[int] = []

    def index(self, draw: int) -> int:
        """The task of draw `draw`; each epoch visits every task once."""
        epoch, at = divmod(draw, self.count)
        if not self.shuffle:
            return at
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation, self._epoch = generator.permutation(self.count).tolist(), epoch
        return self._permutation[at]
