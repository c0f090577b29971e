"""Which micro-batches a data parallel rank computes, and their nodes, padded so that ranks can share them.

All ranks run the same number of micro-batches, because experts of several data ranks answer each other and stages of a pipeline take turns:
where one has fewer it runs fillers. Nothing is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from palestra.trainer.balancing import balance, filler
from palestra.trainer.megatron.parallel.model import Nodes
from palestra.trainer.prefix import PrefixTree, pack
from palestra.trainer.tensors import added, predictors_of, putter
from palestra.trainer.types import I64, MicroBatch


@dataclass(frozen=True, slots=True)
class Turn:
    """One micro-batch of one rank."""

    batch: MicroBatch
    index: int
    """Among those of the whole step; -1: a filler, whose loss nobody asks for."""
    nodes: int
    """That go through the model, padding excluded."""


def turns(batches: Sequence[MicroBatch], ranks: int, multiple: int = 1) -> list[list[Turn]]:
    """What each of `ranks` data ranks runs: about as many nodes, and exactly as many micro-batches, a multiple of `multiple` (P210:
    interleaved schedules take them by PP at a time)."""
    sizes = [_nodes(batch) for batch in batches]
    shares = balance(sizes, ranks)
    count = math.ceil(max(map(len, shares)) / multiple) * multiple
    idle = Turn(filler().batch, -1, 1)
    return [[Turn(batches[at], at, sizes[at]) for at in share] + [idle] * (count - len(share)) for share in shares]


def _nodes(batch: MicroBatch) -> int:
    tree = PrefixTree()
    for ids, length in zip(batch.token_ids, batch.lengths, strict=True):
        tree.add(ids[:length].tolist())
    return len(tree)


def nodes_of(batch: MicroBatch, found: tuple[I64, I64], width: int, masked: bool, device: torch.device) -> Nodes:
    """The nodes of a micro-batch, padded to `width`; padding sees itself and is seen by nothing that is real.

    `found`: row and column of the tokens that are predicted (`tensors.chosen`).

    `masked`: with a mask even where a single row would be plainly causal.
    """
    packed, put, (rows, columns) = pack(batch), putter(device), found
    real = len(packed.token_ids)
    ids, positions = np.zeros(width, dtype=np.int64), np.zeros(width, dtype=np.int64)
    ids[:real], positions[:real] = packed.token_ids, packed.positions
    visible = None
    if packed.visible is not None or masked:
        sees = np.eye(width, dtype=np.bool_)
        sees[:real, :real] = np.tri(real, dtype=np.bool_) if packed.visible is None else packed.visible
        visible = added(put(sees))[None, None]
    return Nodes(
        token_ids=put(ids),
        positions=put(positions),
        visible=visible,
        predictors=put(predictors_of(packed, rows, columns)),
        targets=put(batch.token_ids[rows, columns]),
        temperature=put(batch.temperature[rows]),
    )
