"""Micro-batches as tensors, in the ways that every backend needs them. In: arrays. Out: tensors on a device. Nothing is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from palestra.trainer.prefix import Packed
from palestra.trainer.types import I64, MicroBatch


def putter(device: torch.device) -> Callable[[Any], torch.Tensor]:
    """Puts numpy arrays onto a device."""

    def put(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return put


def tensors_of(batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """What a loss is given: the arrays that a micro-batch has, by field name."""
    put = putter(device)
    named = ((each.name, getattr(batch, each.name)) for each in fields(batch))
    return {name: put(value) for name, value in named if value is not None}


def chosen(batch: MicroBatch) -> tuple[I64, I64]:
    """Row and column, [K] each, of the tokens whose weight is not 0: those whose log p is asked for."""
    rows, columns = np.nonzero(batch.weights[:, 1:])
    return rows, columns + 1


def predictors_of(packed: Packed, rows: I64, columns: I64) -> I64:
    """[K] the node of the token tree that predicts each of the chosen tokens."""
    return np.array([packed.paths[r][c - 1] for r, c in zip(rows, columns, strict=True)], dtype=np.int64)


def added(visible: torch.Tensor) -> torch.Tensor:
    """Who sees whom, as numbers that are added to attention's scores: 0 or -inf. Made of truth values they would be made once a layer, and
    each layer's copy kept for the backward pass."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
