"""What of a micro-batch goes through the model: its token tree where rows may share their beginnings, else its padded rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from palestra.trainer.fsdp.model import Inputs
from palestra.trainer.prefix import pack
from palestra.trainer.types import I64, MicroBatch


def inputs_of(batch: MicroBatch, share: bool, device: torch.device) -> tuple[Inputs, I64, I64, int]:
    """The inputs; row and column of each of the K tokens whose log p is asked for; and how many tokens go through the model."""
    rows, columns = np.nonzero(batch.weights[:, 1:])
    columns = columns + 1

    def put(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    asked = put(batch.token_ids[rows, columns]), put(batch.temperature[rows])
    if share:
        packed = pack(batch)
        predictors = np.array([packed.paths[r][c - 1] for r, c in zip(rows, columns, strict=True)], dtype=np.int64)
        mask = None if packed.visible is None else _added(put(packed.visible))[None, None]
        tree = Inputs(put(packed.token_ids)[None], mask, put(packed.positions)[None], put(predictors), *asked)
        return tree, rows, columns, len(packed.token_ids)
    width = batch.token_ids.shape[1]
    # Rows are padded on the right: nothing that counts can see the padding, but layers that keep a state are told of it.
    mask = put((np.arange(width) < batch.lengths[:, None]).astype(np.int64))
    padded = Inputs(put(batch.token_ids), mask, None, put(rows * width + columns - 1), *asked)
    return padded, rows, columns, int(batch.lengths.sum())


def _added(visible: torch.Tensor) -> torch.Tensor:
    """Who sees whom, as what is added to attention's scores: made once here, and not by every layer for itself."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
