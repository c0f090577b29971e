"""Losses: pure functions of log p, each with its source. Weights are already normalised, so every loss is a plain weighted sum.

In: log p [B, S] and a micro-batch's arrays as tensors. Out: the loss, and sums for the metrics: names that begin with `max_` are combined
by taking the largest, all others by adding up. Positions of weight 0 give no gradient, whatever lies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from palestra.trainer.correction import RatioCorrection

Batch = Mapping[str, torch.Tensor]
Sums = dict[str, torch.Tensor]


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Schulman's unbiased, non-negative estimate of KL(p || other) from samples of p: r - 1 - log r with r = other / p
    ("Approximating KL divergence", 2020; equation 4 of DeepSeekMath)."""
    log_ratio = other - logprobs
    return log_ratio.exp() - 1 - log_ratio


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, equation 7) as GRPO uses it, with separate bounds below and above (DAPO, Yu et
    al. 2025) and GRPO's KL penalty against a reference.

    The ratio is taken against `old_logprobs`; where there are none, against the engine's, or with a correction against the policy itself,
    which is right for the first update of a batch: nothing has moved yet."""

    clip_low: float = 0.2
    """The ratio is not followed below 1 - clip_low."""
    clip_high: float = 0.2
    """Nor above 1 + clip_high."""
    kl_coef: float = 0.0
    correction: RatioCorrection | None = None
    """For tokens that another policy sampled."""

    def __call__(self, logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """The loss, and sums over the trained tokens."""
        weights, advantages, rollout = batch["weights"], batch["advantages"], batch["rollout_logprobs"]
        on = weights != 0
        old, corrected = batch.get("old_logprobs", rollout), Sums()
        if self.correction is not None:
            old = batch.get("old_logprobs", logprobs.detach())
            factors, corrected = self.correction(old, rollout, on)
            weights = weights * factors
        delta = torch.where(on, logprobs - old, 0.0)
        ratio = delta.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        loss = -(weights * surrogate).sum()
        sums = corrected | self._sums(logprobs.detach(), ratio.detach(), on, batch)
        sums["clipped"] = ((clipped * advantages < ratio * advantages) & on).sum()
        if self.kl_coef:
            penalty = torch.where(on, k3(logprobs, batch["ref_logprobs"]), 0.0)
            loss = loss + self.kl_coef * (weights * penalty).sum()
            sums["kl_ref"] = penalty.detach().sum()
        return loss, sums

    @staticmethod
    def _sums(logprobs: torch.Tensor, ratio: torch.Tensor, on: torch.Tensor, batch: Batch) -> Sums:
        """KL and differences are those to the policy that sampled, the ratio is the one that is clipped."""
        moved = torch.where(on, logprobs - batch["rollout_logprobs"], 0.0)
        return {
            "tokens": on.sum(),
            "ratio": torch.where(on, ratio, 0.0).sum(),
            "max_ratio": torch.where(on, ratio, 0.0).max(),
            "kl_rollout": (moved.exp() - 1 - moved).sum(),
            "abs_dlogp": moved.abs().sum(),
            "max_abs_dlogp": moved.abs().max(),
            "nll": torch.where(on, -logprobs, 0.0).sum(),
        }


def nll_loss(logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Sums]:
    """Negative log likelihood: supervised fine-tuning."""
    weights = batch["weights"]
    on = weights != 0
    return -(weights * logprobs).sum(), {"tokens": on.sum(), "nll": torch.where(on, -logprobs.detach(), 0.0).sum()}
