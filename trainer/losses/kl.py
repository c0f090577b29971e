"""Estimates of KL(p || other) from samples of p (Schulman 2020, "Approximating KL divergence"). Pure.

In: log p of sampled tokens under both. Out: one number per token, whose mean estimates the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

Estimate: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log p - log other: unbiased, of either sign. For a reward only: as a loss its gradient is that of log p, whose mean is 0."""
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(log p - log other)^2 / 2: biased, but as a loss its gradient is that of the divergence (Liu et al. 2025, "Rethinking KL
    Regularization in RLHF")."""
    return (logprobs - other).square() / 2


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = other / p: unbiased and never negative (equation 4 of DeepSeekMath, Shao et al. 2024)."""
    log_ratio = other - logprobs
    return log_ratio.exp() - 1 - log_ratio


ESTIMATES: Mapping[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name that `algo.kl_estimator` gives."""
