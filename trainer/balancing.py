"""Work of unlike sizes over data ranks: the largest differencing method, and the micro-batches of each rank. Pure; numpy only.

In: the rows of one optimizer step. Out: per rank its micro-batches, as many on each: ranks go through the collectives of a model step by
step together. Rows are packed first and micro-batches distributed second, so what goes through a model at once is full, and rows that
begin alike stay together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from palestra.trainer.batches import BatchRow, Packing, packed_rows, padded
from palestra.trainer.prefix import PrefixTree
from palestra.trainer.types import MicroBatch, TrainerError

FINER = (1, 2, 4)
"""How many micro-batches a rank is tried to be given where one full one each would be too many."""


def balance(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `sizes` for each rank, ascending, such that the largest sum is small: the largest differencing method (Karmarkar and Karp
    1982) for several parts, whose largest sum is at most 4/3 - 1/(3 ranks) of the best one (Michiels et al. 2003). Ranks may get
    unlike numbers of indices, or none; the first has the largest sum. Equal inputs give equal answers.

    Raises:
        TrainerError: no rank, or a negative size.
    """
    if ranks < 1 or any(size < 0 for size in sizes):
        raise TrainerError(f"cannot spread sizes over {ranks} ranks: there must be at least one, and no size below 0")
    # A partial answer: per rank (its sum, its indices), the largest sum first. The heap gives that of the largest difference, then the
    # oldest one.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, size in enumerate(sizes):
        heap.append(
            (-size if ranks > 1 else 0, index, [(size, [index]), *((0, list[int]()) for _ in range(ranks - 1))])
        )
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [
            (a + b, own + other) for (a, own), (b, other) in zip(first, reversed(second), strict=True)
        ]  # the largest sum of one meets the smallest of the other
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], made, joined))
        made += 1
    return [sorted(own) for _, own in heap[0][2]] if heap else [[] for _ in range(ranks)]


def distribute(rows: Sequence[BatchRow], ranks: int, max_tokens: int) -> list[list[Packing]]:
    """The micro-batches of each rank, of at most `max_tokens` distinct tokens (a longer row is one of its own), the same number for each
    rank. Where a rank has fewer it gets fillers. Without rows nobody has any.

    Micro-batches are smaller where that gives each rank some, and leaves the busiest one less to do.

    Raises:
        TrainerError: no rank.
    """
    packings, shares = _best(rows, ranks, max_tokens)
    most = max(map(len, shares))
    return [
        [*(padded(packings[at][0]) for at in share), *(filler() for _ in range(most - len(share)))] for share in shares
    ]


def filler() -> Packing:
    """A micro-batch of no row: one token that nothing is learned from, for a rank that has to go through the model with the others. Its
    gradients are 0, and its loss too."""
    ids, zeros = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1), dtype=np.float32)
    lengths, temperature = np.ones(1, dtype=np.int64), np.ones(1, dtype=np.float32)
    return Packing(MicroBatch(ids, lengths, zeros, zeros.copy(), zeros.copy(), temperature), ())


def _best(
    rows: Sequence[BatchRow], ranks: int, max_tokens: int
) -> tuple[list[tuple[list[BatchRow], int]], list[list[int]]]:
    """Packings with their tokens, and each rank's share of them: of the sizes that are tried, the one whose busiest rank has least to do,
    and of those the one with the fewest micro-batches."""
    total = _distinct(rows) if ranks > 1 else 0
    budgets = [max_tokens, *(-(-total // (ranks * finer)) for finer in FINER)] if ranks > 1 else [max_tokens]
    found = []
    for budget in sorted({min(max_tokens, max(1, each)) for each in budgets}, reverse=True):
        packings = packed_rows(rows, budget)
        shares = balance([tokens for _, tokens in packings], ranks)
        busiest = max(sum(packings[at][1] for at in share) for share in shares)
        found.append(((busiest, max(map(len, shares)), -budget), packings, shares))
    _, packings, shares = min(found, key=lambda each: each[0])
    return packings, shares


def _distinct(rows: Sequence[BatchRow]) -> int:
    tree = PrefixTree()
    for row in rows:
        tree.add(row.token_ids.tolist())
    return len(tree)
