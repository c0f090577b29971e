"""The loss of supervised fine-tuning. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def nll_loss(logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log likelihood: supervised fine-tuning."""
    weights = batch["weights"]
    on = weights != 0
    return -(weights * logprobs).sum(), {"tokens": on.sum(), "nll": torch.where(on, -logprobs.detach(), 0.0).sum()}
