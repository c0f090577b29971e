"""What of each token a policy loss raises. Pure functions, each with its source.

In: log p of the policy and of the weights that the ratio is taken against ("old"), advantages, which tokens count, and the bounds. Out: the
values whose weighted sum is raised, and for the metrics which ratio was bounded and where the bound decided. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from palestra.trainer.correction import row_mean


@dataclass(frozen=True, slots=True)
class Clip:
    """How far a ratio is followed."""

    low: float = 0.2
    """Not below 1 - low."""
    high: float = 0.2
    """Nor above 1 + high."""
    dual: float | None = None
    """Nor, where the advantage is negative, above this. None: however far."""

    def bounded(self, ratio: torch.Tensor) -> torch.Tensor:
        """The ratio within [1 - low, 1 + high]."""
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """All [B, S]; only tokens that count mean anything."""

    values: torch.Tensor
    """Differentiable in log p; finite everywhere."""
    ratio: torch.Tensor
    """policy / old, the ratio that the bounds are about; of the whole row where a loss goes by rows."""
    clipped: torch.Tensor
    """Where a bound decided."""


Raise: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Clip], Surrogate]
"""(log p, old log p, advantages, which tokens count, bounds)."""


def _least(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> Surrogate:
    """min(r A, clip(r) A), the pessimistic bound; with `dual`, for negative advantages, at least dual * A."""
    plain, bounded = ratio * advantages, clip.bounded(ratio) * advantages
    values, clipped = torch.minimum(plain, bounded), bounded < plain
    if clip.dual is not None:
        deepest = clip.dual * advantages
        beyond = (advantages < 0) & (values < deepest)
        values, clipped = torch.where(beyond, deepest, values), clipped | beyond
    return Surrogate(values, ratio.detach(), clipped)


def _moved(logprobs: torch.Tensor, old: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """log of the ratio, 0 where a token does not count."""
    return torch.where(on, logprobs - old, 0.0)


def ppo(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, clip: Clip) -> Surrogate:
    """The clipped surrogate (Schulman et al. 2017, equation 7) as GRPO uses it, with separate bounds (DAPO, Yu et al. 2025) and the second
    bound of dual-clip PPO (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning")."""
    return _least(_moved(logprobs, old, on).exp(), advantages, clip)


def gspo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, clip: Clip
) -> Surrogate:
    """GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 and 7): the ratio is that of the row, by geometric mean,
    and it is clipped as a whole. Its tokens share the gradient evenly."""
    ratio = row_mean(logprobs - old, on).exp().expand_as(logprobs)
    return _least(ratio, advantages, clip)


def gspo_token(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, clip: Clip
) -> Surrogate:
    """GSPO-token (the same, equations 13 and 14): the row's ratio in value, each token's own in gradient. It equals `gspo` where all tokens
    of a row have one advantage and one weight, and gives credit by token where they do not."""
    moved = _moved(logprobs, old, on)
    row = row_mean(moved.detach(), on).exp()
    return _least(row * (moved - moved.detach()).exp(), advantages, clip)


def cispo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, clip: Clip
) -> Surrogate:
    """CISPO (MiniMax 2025, "MiniMax-M1", equation 4): the ratio is a bounded weight without gradient, so that no token's gradient is ever
    cut to 0."""
    ratio = _moved(logprobs, old, on).detach().exp()
    bounded = clip.bounded(ratio)
    return Surrogate(bounded * advantages * torch.where(on, logprobs, 0.0), ratio, bounded != ratio)


def reinforce(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, clip: Clip
) -> Surrogate:
    """A log p (Williams 1992): the plain policy gradient; nothing is bounded, and the ratio is only told."""
    ratio = _moved(logprobs, old, on).detach().exp()
    return Surrogate(advantages * torch.where(on, logprobs, 0.0), ratio, torch.zeros_like(on))


SURROGATES: Mapping[str, Raise] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""By the name that `algo.loss` gives."""
