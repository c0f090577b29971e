"""The entropy of predictions, from the logits that their log p is made of. Pure.

In: logits [K, vocabulary], already at their temperature. Out: nats [K]. Nothing is waited for.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Wanted: TypeAlias = Literal["none", "told", "trained"]
"""none: it is not computed; told: a figure without gradient; trained: with one."""

BLOCK = 256
"""Predictions of which a figure is made at a time: what it needs beside the logits is as large as those of a block."""


def entropy_of(logits: torch.Tensor, *, trained: bool) -> torch.Tensor:
    """-sum p log p of each row. Without `trained` there is no gradient, and little memory beside the logits."""
    if trained:
        return _entropy(logits)
    with torch.no_grad():
        return torch.cat([_entropy(block) for block in torch.split(logits, BLOCK)])


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
