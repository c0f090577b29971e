"""What another policy sampled, corrected: weights of single tokens. Pure functions, each with its source.

In: log p of the trainer's weights before the step ("old") and of the engine that sampled ("rollout"), both of the same tokens. Out: what
each token's loss is multiplied by, without gradients, and sums for the metrics. Nothing is waited for.

With it the surrogate is the decoupled one: the ratio that is clipped is policy / old, and old / rollout corrects for who sampled (Hilton,
Cobbe and Schulman 2021, "Batch size-invariance for policy optimization"; AReaL, Fu et al. 2025). So the clip holds
the step near the weights that it starts from, however old the tokens are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["tis", "mask", "seq_mask"]
Weigh: TypeAlias = Callable[[torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]
"""(log ratio [B, S], which tokens count [B, S], token bound, row bound) -> weights [B, S], which tokens are left out [B, S]."""


def truncated(
    log_ratio: torch.Tensor, on: torch.Tensor, bound: float, row_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(bound, ratio): truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; Ionides 2008)."""
    return log_ratio.exp().clamp(max=bound), torch.zeros_like(on)


def masked(
    log_ratio: torch.Tensor, on: torch.Tensor, bound: float, row_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio itself where it lies in [1 / bound, bound], and 0 elsewhere (IcePop; Ling Team 2025, "Every Step Evolves")."""
    ratio = log_ratio.exp()
    out = on & ((ratio > bound) | (ratio < 1 / bound))
    return torch.where(out, 0.0, ratio), out


def sequence_masked(
    log_ratio: torch.Tensor, on: torch.Tensor, bound: float, row_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`truncated`, but 0 in rows whose ratio by geometric mean, which does not grow with length (GSPO, Zheng et al. 2025), lies
    outside [1 / row_bound, row_bound] (Liu et al. 2025, "When Speed Kills Stability")."""
    weights, _ = truncated(log_ratio, on, bound, row_bound)
    counts = on.sum(-1, keepdim=True).clamp(min=1)
    mean = (torch.where(on, log_ratio, 0.0).sum(-1, keepdim=True) / counts).exp()
    out = on & ((mean > row_bound) | (mean < 1 / row_bound))
    return torch.where(out, 0.0, weights), out


WEIGHS: dict[Kind, Weigh] = {"tis": truncated, "mask": masked, "seq_mask": sequence_masked}
"""By the name that `algo.ratio_correction` gives."""

LARGEST = 20.0
"""Log ratios beyond it, either way, count as this: their exponential would otherwise be infinite and spoil the means."""


@dataclass(frozen=True, slots=True)
class RatioCorrection:
    """One of the kinds, with its bounds."""

    kind: Kind
    bound: float = 2.0
    """Of a token's ratio."""
    row_bound: float = 1.1
    """Of a row's geometric mean."""

    def __call__(
        self, old: torch.Tensor, rollout: torch.Tensor, on: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights [B, S], 1 where `on` is false, and sums over the tokens where it is true."""
        log_ratio = torch.where(on, old.detach() - rollout, 0.0).clamp(-LARGEST, LARGEST)
        weights, out = WEIGHS[self.kind](log_ratio, on, self.bound, self.row_bound)
        ratio = torch.where(on, log_ratio.exp(), 0.0)
        cut = on & ~out & (weights < ratio)
        sums = {
            "correction": ratio.sum(),
            "max_correction": ratio.max(),
            "correction_cut": (cut | out).sum(),
            "correction_masked": out.sum(),
        }
        return weights, sums
