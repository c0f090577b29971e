"""The loss of a policy: a surrogate, what is left out or corrected of old tokens, a KL penalty and an entropy bonus. Pure.

In: log p [B, S] and a micro-batch's arrays. Out: the loss and sums for the metrics. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from palestra.trainer.correction import RatioCorrection, row_mean
from palestra.trainer.losses.kl import ESTIMATES
from palestra.trainer.losses.surrogates import SURROGATES, Clip
from palestra.trainer.types import Loss, TrainerError

Batch = Mapping[str, torch.Tensor]
Sums = dict[str, torch.Tensor]


def off_policy_rows(
    logprobs: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor, on: torch.Tensor, delta: float
) -> torch.Tensor:
    """[B, S] tokens with a negative advantage in rows that the policy has left: the mean of log rollout - log p is above `delta`
    (off-policy sequence masking, DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1). What went well is learned however far away."""
    away = row_mean(rollout - logprobs.detach(), on) > delta
    return on & away & (advantages < 0)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A surrogate with GRPO's KL penalty against a reference (Shao et al. 2024).

    The ratio is taken against `old_logprobs`; where there are none, against the engine's, or with a correction against the policy itself,
    which is right for the first update of a batch: nothing has moved yet."""

    clip_low: float = 0.2
    """The ratio is not followed below 1 - clip_low."""
    clip_high: float = 0.2
    """Nor above 1 + clip_high."""
    kl_coef: float = 0.0
    """Of the penalty in the loss."""
    correction: RatioCorrection | None = None
    """For tokens that another policy sampled."""
    kind: str = "ppo"
    """One of SURROGATES."""
    dual_clip: float | None = None
    """Of ppo: with a negative advantage the ratio is not followed above this."""
    kl_estimator: str = "k3"
    """One of ESTIMATES."""
    entropy_coef: float = 0.0
    """What the mean entropy of the predictions is rewarded with; the backend must give `entropy` [B, S] then."""
    opsm_delta: float | None = None
    """Bound of `off_policy_rows`, nats per token; None: no row is left out."""
    own: Loss | None = None
    """A loss of the user's in the surrogate's place. It sees the corrected weights, and always `old_logprobs`."""

    def __call__(self, logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """The loss, and sums over the trained tokens."""
        weights, advantages, rollout = batch["weights"], batch["advantages"], batch["rollout_logprobs"]
        on = weights != 0
        old, sums = batch.get("old_logprobs", rollout), Sums()
        if self.correction is not None:
            old = batch.get("old_logprobs", logprobs.detach())
            factors, sums = self.correction(old, rollout, on)
            weights = weights * factors
        raised = weights
        if self.opsm_delta is not None:
            out = off_policy_rows(logprobs, rollout, advantages, on, self.opsm_delta)
            raised = torch.where(out, 0.0, weights)
            sums["opsm_masked"] = out.sum()
        if self.own is None:
            surrogate = SURROGATES[self.kind](logprobs, old, advantages, on, self._clip)
            loss, ratio = -torch.where(on, raised * surrogate.values, 0.0).sum(), surrogate.ratio
            sums["clipped"] = (surrogate.clipped & on).sum()
        else:
            loss, told = self.own(logprobs, {**batch, "weights": raised, "old_logprobs": old})
            ratio = torch.where(on, logprobs.detach() - old, 0.0).exp()
            sums |= {_own_name(name): value for name, value in told.items()}
        sums |= _told(logprobs.detach(), ratio, on, batch)
        return loss + self._beside(logprobs, weights, on, batch, sums), sums

    @property
    def _clip(self) -> Clip:
        return Clip(self.clip_low, self.clip_high, self.dual_clip)

    def _beside(
        self, logprobs: torch.Tensor, weights: torch.Tensor, on: torch.Tensor, batch: Batch, sums: Sums
    ) -> torch.Tensor:
        """KL penalty and entropy bonus; adds what they were to `sums`."""
        extra = logprobs.new_zeros(())
        if self.kl_coef:
            penalty = torch.where(on, ESTIMATES[self.kl_estimator](logprobs, batch["ref_logprobs"]), 0.0)
            extra = extra + self.kl_coef * (weights * penalty).sum()
            sums["kl_ref"] = penalty.detach().sum()
        entropy = batch.get("entropy")
        if entropy is not None:
            sums["entropy"] = torch.where(on, entropy.detach(), 0.0).sum()
        if self.entropy_coef:
            if entropy is None:
                raise TrainerError("algo.entropy_coef needs a backend that gives the entropy of its predictions")
            extra = extra - self.entropy_coef * (weights * torch.where(on, entropy, 0.0)).sum()
        return extra


def _own_name(name: str) -> str:
    return f"max_own/{name[4:]}" if name.startswith("max_") else f"own/{name}"


def _told(logprobs: torch.Tensor, ratio: torch.Tensor, on: torch.Tensor, batch: Batch) -> Sums:
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
