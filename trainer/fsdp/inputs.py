"""What of a micro-batch goes through the model: its token tree where rows may share their beginnings, else its padded rows."""

from __future__ import annotations

import numpy as np
import torch

from palestra.trainer.fsdp.model import Inputs
from palestra.trainer.prefix import pack
from palestra.trainer.tensors import added, chosen, predictors_of, putter
from palestra.trainer.types import I64, MicroBatch


def inputs_of(batch: MicroBatch, share: bool, device: torch.device) -> tuple[Inputs, I64, I64, int]:
    """The inputs; row and column of each of the K tokens whose log p is asked for; and how many tokens go through the model."""
    (rows, columns), put = chosen(batch), putter(device)
    asked = put(batch.token_ids[rows, columns]), put(batch.temperature[rows])
    if share:
        packed = pack(batch)
        predictors = predictors_of(packed, rows, columns)
        mask = None if packed.visible is None else added(put(packed.visible))[None, None]
        tree = Inputs(put(packed.token_ids)[None], mask, put(packed.positions)[None], put(predictors), *asked)
        return tree, rows, columns, len(packed.token_ids)
    width = batch.token_ids.shape[1]
    # Rows are padded on the right: nothing that counts can see the padding, but layers that keep a state are told of it.
    mask = put((np.arange(width) < batch.lengths[:, None]).astype(np.int64))
    padded = Inputs(put(batch.token_ids), mask, None, put(rows * width + columns - 1), *asked)
    return padded, rows, columns, int(batch.lengths.sum())
