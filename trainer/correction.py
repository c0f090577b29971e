"""What another policy sampled, corrected: weights of tokens and of rows. Pure functions, each with its source.

In: log p of the trainer's weights before the step ("old") and of the engine that sampled ("rollout"), both of the same tokens. Out: what
each token's loss is multiplied by, without gradients, and sums for the metrics. Nothing is waited for.

With it the surrogate is the decoupled one: the ratio that is clipped is policy / old, and old / rollout corrects for who sampled (Hilton,
Cobbe and Schulman 2021, "Batch size-invariance for policy optimization"; AReaL, Fu et al. 2025). So the clip holds
the step near the weights that it starts from, however old the tokens are.

A row's ratio is that of its trained tokens. A micro-batch holds whole rows, so nothing of a row is elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Kind: TypeAlias = Literal["tis", "mask", "seq_mask", "seq_tis", "seq_mis", "geo_mask"]

LARGEST = 20.0
"""Log ratios beyond it, either way, count as this: their exponential would otherwise be infinite and spoil the means."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between what a ratio is left as it is."""

    low: float
    """Of a token's ratio, or of a row's product of ratios."""
    high: float
    row: float
    """A row's geometric mean lies in [1 / row, row]."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a kind makes of ratios; all [B, S]. What stands where a token does not count is meaningless."""

    weights: torch.Tensor
    out: torch.Tensor
    """Which tokens are left out."""
    cut: torch.Tensor
    """Which tokens count for less than their ratio says, but count."""


Weigh: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Bounds], Weighed]
"""(log ratio [B, S], which tokens count [B, S], bounds)."""


def row_mean(values: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """[B, 1] mean of [B, S] over the tokens that count; 0 in rows without any."""
    return torch.where(on, values, 0.0).sum(-1, keepdim=True) / on.sum(-1, keepdim=True).clamp(min=1)


def truncated(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """min(high, ratio): truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; Ionides 2008)."""
    ratio = log_ratio.exp()
    return Weighed(ratio.clamp(max=bounds.high), torch.zeros_like(on), on & (ratio > bounds.high))


def masked(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """The ratio itself where it lies in [low, high], and 0 elsewhere (IcePop; Ling Team 2025, "Every Step Evolves")."""
    ratio = log_ratio.exp()
    out = on & ((ratio > bounds.high) | (ratio < bounds.low))
    return Weighed(torch.where(out, 0.0, ratio), out, torch.zeros_like(on))


def _far_rows(log_ratio: torch.Tensor, on: torch.Tensor, bound: float) -> torch.Tensor:
    """Tokens of rows whose ratio by geometric mean, which does not grow with length (GSPO, Zheng et al. 2025), lies outside
    [1 / bound, bound]."""
    mean = row_mean(log_ratio, on).exp()
    return on & ((mean > bound) | (mean < 1 / bound))


def sequence_masked(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """`truncated`, but 0 in rows that are far away by geometric mean (Liu et al. 2025, "When Speed Kills Stability")."""
    told, out = truncated(log_ratio, on, bounds), _far_rows(log_ratio, on, bounds.row)
    return Weighed(torch.where(out, 0.0, told.weights), out, told.cut & ~out)


def geometric_masked(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """1, but 0 in rows that are far away by geometric mean: rejection alone, without weights (Liu et al. 2025, as above)."""
    out = _far_rows(log_ratio, on, bounds.row)
    return Weighed(torch.where(out, 0.0, torch.ones_like(log_ratio)), out, torch.zeros_like(on))


def _products(log_ratio: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """[B, S] the product of each row's ratios: the ratio of the whole reply."""
    total = torch.where(on, log_ratio, 0.0).sum(-1, keepdim=True).clamp(-LARGEST, LARGEST)
    return total.exp().expand_as(log_ratio)


def sequence_truncated(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """min(high, product of the row's ratios), the same for all of its tokens: truncated importance sampling of replies, whose bias is only
    that of the bound (Liu et al. 2025, "When Speed Kills Stability")."""
    ratio = _products(log_ratio, on)
    return Weighed(ratio.clamp(max=bounds.high), torch.zeros_like(on), on & (ratio > bounds.high))


def sequence_rejected(log_ratio: torch.Tensor, on: torch.Tensor, bounds: Bounds) -> Weighed:
    """The product of the row's ratios where it lies in [low, high], and 0 elsewhere: masked importance sampling of replies (Liu et al.
    2025, as above)."""
    ratio = _products(log_ratio, on)
    out = on & ((ratio > bounds.high) | (ratio < bounds.low))
    return Weighed(torch.where(out, 0.0, ratio), out, torch.zeros_like(on))


WEIGHS: dict[Kind, Weigh] = {
    "tis": truncated,
    "mask": masked,
    "seq_mask": sequence_masked,
    "seq_tis": sequence_truncated,
    "seq_mis": sequence_rejected,
    "geo_mask": geometric_masked,
}
"""By the name that `algo.ratio_correction` gives."""


@dataclass(frozen=True, slots=True)
class RatioCorrection:
    """One of the kinds, with its bounds."""

    kind: Kind
    bound: float = 2.0
    """Of a token's ratio, or of a row's product."""
    row_bound: float = 1.1
    """Of a row's geometric mean."""
    floor: float | None = None
    """What `mask` and `seq_mis` leave out below; None: 1 / bound."""
    veto: float | None = None
    """A row of which one token's ratio is below it is left out: the engine sampled what the trainer would hardly ever have said (the token
    veto of verl's rollout correction). None: no veto."""

    def __call__(
        self, old: torch.Tensor, rollout: torch.Tensor, on: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights [B, S], and sums over the tokens where `on` is true. Weights elsewhere are finite and mean nothing."""
        moved = torch.where(on, old.detach() - rollout, 0.0)
        log_ratio = moved.clamp(-LARGEST, LARGEST)
        floor = 1 / self.bound if self.floor is None else self.floor
        told = WEIGHS[self.kind](log_ratio, on, Bounds(floor, self.bound, self.row_bound))
        weights, out, cut = told.weights, told.out, told.cut
        ratio = torch.where(on, log_ratio.exp(), 0.0)
        vetoed = torch.zeros_like(on[:, :1])
        if self.veto is not None:
            vetoed = (on & (moved < math.log(self.veto))).any(-1, keepdim=True)
            out, cut = out | (on & vetoed), cut & ~vetoed
            weights = torch.where(vetoed, 0.0, weights)
        counted = torch.where(on, weights, 0.0)
        sums = {
            "correction": ratio.sum(),
            "max_correction": ratio.max(),
            "correction_cut": (cut | out).sum(),
            "correction_masked": out.sum(),
            "correction_vetoed": vetoed.sum(),
            "correction_weight": counted.sum(),
            "correction_square": counted.square().sum(),
        }
        return weights, sums
