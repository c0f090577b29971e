"""How the losses of an optimizer step's tokens become one number: the weight of each token. Pure.

In: the rollouts of one optimizer step, each as its group and the trained tokens of all its rows together. Out: the weight that each of
their tokens has; the step's loss is the sum of weight times token loss. Rollouts without a trained token are not among them: a row that is
masked through and through divides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from palestra.trainer.config import AlgoConfig
from palestra.trainer.types import TrainerError

Kind: TypeAlias = Literal["rollout_mean", "token_mean", "prompt_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Share:
    """One rollout of an optimizer step."""

    group_id: str
    tokens: int
    """Trained ones, over all of its rows; at least 1."""


Weigh: TypeAlias = Callable[[Sequence[Share], int], list[float]]
"""(rollouts of the step, the constant) -> the weight of each token of each rollout."""


def rollout_mean(shares: Sequence[Share], constant: int) -> list[float]:
    """The mean over rollouts of the mean over their tokens: neither length nor forks change a rollout's say (Shao et al. 2024,
    DeepSeekMath, equation 3)."""
    return [1 / (len(shares) * share.tokens) for share in shares]


def token_mean(shares: Sequence[Share], constant: int) -> list[float]:
    """The mean over all tokens: a long rollout has more say (Yu et al. 2025, DAPO, section 3.3)."""
    total = sum(share.tokens for share in shares)
    return [1 / total for _ in shares]


def prompt_mean(shares: Sequence[Share], constant: int) -> list[float]:
    """The mean over groups of the mean over their tokens (Khatri et al. 2025, "The Art of Scaling RL Compute").
    Of a group that is spread over several steps, each step has the part that lies in it."""
    totals: Counter[str] = Counter()
    for share in shares:
        totals[share.group_id] += share.tokens
    return [1 / (len(totals) * totals[share.group_id]) for share in shares]


def constant_mean(shares: Sequence[Share], constant: int) -> list[float]:
    """The mean over rollouts of the sum over their tokens, divided by a constant: a token's weight depends on nobody's length (Liu et al.
    2025, "Understanding R1-Zero-Like Training", section 3.2)."""
    return [1 / (len(shares) * constant) for _ in shares]


WEIGHS: Mapping[Kind, Weigh] = {
    "rollout_mean": rollout_mean,
    "token_mean": token_mean,
    "prompt_mean": prompt_mean,
    "constant": constant_mean,
}
"""By the name that `algo.reduction` gives."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One of the kinds, with its constant."""

    kind: Kind = "rollout_mean"
    tokens: int = 1
    """Of constant alone."""

    def __call__(self, shares: Sequence[Share]) -> list[float]:
        """The weight of each token of each rollout.

        Raises:
            TrainerError: a rollout without a trained token is among them.
        """
        if any(share.tokens < 1 for share in shares):
            raise TrainerError("a rollout without a trained token has no weight: leave it out")
        return WEIGHS[self.kind](shares, self.tokens)


def reduction_of(algo: AlgoConfig) -> Reduction:
    """The run's reduction."""
    return Reduction(algo.reduction, algo.reduction_tokens or 1)
