"""How long a step may generate before it takes what is ready: partial rollout.

In: publishes and sampled tokens. Out: whether the present step's budget is spent, and when it will be. Pure but for the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class StepBudget:
    """Counts from the publish that opened the step."""

    def __init__(self, seconds: float | None, tokens: int | None, clock: Callable[[], float]) -> None:
        self._seconds, self._tokens, self._clock = seconds, tokens, clock
        self._since: float | None = None
        self._sampled = 0

    def begin(self) -> None:
        """A step begins to generate."""
        self._since, self._sampled = self._clock(), 0

    def add(self, tokens: int) -> None:
        """So many were sampled, by any rollout."""
        self._sampled += tokens

    @property
    def spent(self) -> bool:
        """Whether the step should take what is ready. Without a budget never."""
        if self._tokens is not None and self._sampled >= self._tokens:
            return True
        return self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Until time alone spends it; infinite where it does not."""
        if self._seconds is None or self._since is None:
            return math.inf
        return self._since + self._seconds - self._clock()
