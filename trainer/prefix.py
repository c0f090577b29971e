"""Rows that begin alike, packed so that the common beginning goes through the model once.

In: the token ids of several rows. Out: one sequence of tree nodes, each with its depth as its position, and who may look at whom: a
token sees itself and its ancestors, so every row is computed exactly as if it stood alone. Siblings of a group share their prompt,
and all rows of a run share the system prompt, which is most of what a step would otherwise compute again. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palestra.trainer.types import I64, MicroBatch


class PrefixTree:
    """A tree of tokens; a row is a path from the root."""

    def __init__(self) -> None:
        self._child: dict[tuple[int, int], int] = {}
        self.tokens: list[int] = []
        self.depths: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def shared(self, ids: Sequence[int]) -> int:
        """How many leading tokens of `ids` are already in the tree."""
        node = -1
        for depth, token in enumerate(ids):
            following = self._child.get((node, token))
            if following is None:
                return depth
            node = following
        return len(ids)

    def add(self, ids: Sequence[int]) -> I64:
        """Puts a row in; returns the node of each of its tokens."""
        node, path = -1, np.empty(len(ids), dtype=np.int64)
        for depth, token in enumerate(ids):
            following = self._child.get((node, token))
            if following is None:
                following = self._child[(node, token)] = len(self.tokens)
                self.tokens.append(token)
                self.depths.append(depth)
            path[depth] = node = following
        return path


@dataclass(frozen=True, slots=True)
class Packed:
    """The nodes of a micro-batch, N of them, parents before children."""

    token_ids: I64
    """[N]."""
    positions: I64
    """[N] depth of each node, the position its rows know it by."""
    visible: NDArray[np.bool_] | None
    """[N, N] whether node i (row) may look at node j (column). None: a single row, plainly causal."""
    paths: tuple[I64, ...]
    """Per row, the node of each of its tokens."""


def pack(batch: MicroBatch) -> Packed:
    """The tree of a micro-batch's rows."""
    tree = PrefixTree()
    rows = zip(batch.token_ids, batch.lengths, strict=True)
    paths = tuple(tree.add(ids[:length].tolist()) for ids, length in rows)
    visible = None
    if any(len(path) < len(tree) for path in paths):
        visible = np.zeros((len(tree), len(tree)), dtype=np.bool_)
        for path in paths:
            visible[np.ix_(path, path)] |= np.tri(len(path), dtype=np.bool_)
    token_ids, depths = np.array(tree.tokens, dtype=np.int64), np.array(tree.depths, dtype=np.int64)
    return Packed(token_ids, depths, visible, paths)
