"""From rows with advantages to micro-batches with normalised weights. Pure; numpy only.

The loss of an optimizer step is the sum over its rows and tokens of weight * l. Weights are those of a reduction (`reductions`), which
counts the trained tokens of a rollout over all of its rows: forks of a rollout do not change its say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.server.types import RenderedRow, TrainingSample
from palestra.trainer.prefix import PrefixTree
from palestra.trainer.reductions import Reduction, Share
from palestra.trainer.types import F32, I64, MicroBatch, RowAdvantage, TrainerError


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of an optimizer step. Arrays have length T."""

    token_ids: I64
    weights: F32
    """What each token's loss is multiplied by; 0 where it is not trained."""
    rollout_logprobs: F32
    """0 where the weight is 0."""
    temperature: float
    advantage: RowAdvantage | None = None
    """None in supervised rows."""
    sample: TrainingSample | None = None
    """Where the row comes from; None in supervised rows."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A micro-batch and the rows that it consists of, in its order."""

    batch: MicroBatch
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The optimizer steps of one batch, and what stayed out."""

    updates: tuple[tuple[BatchRow, ...], ...]
    """Rows of each optimizer step; empty where nothing can be trained."""
    rollouts: int
    """Rollouts that are trained."""
    rows_left_out: int
    """Rows without a trained token, or whose rollout has no reward."""


def plan_updates(
    samples: Sequence[TrainingSample],
    advantages: Sequence[RowAdvantage | None],
    updates: int,
    reduction: Reduction | None = None,
) -> Plan:
    """Splits the batch's rollouts, each with all of its rows, over at most `updates` optimizer steps of about equal size, and weighs their
    tokens by `reduction`; None: the mean over rollouts of the mean over their tokens.

    Rollouts keep their order, so siblings stay together and share their prompt in the same step.
    """
    if len(samples) != len(advantages):
        raise TrainerError(f"{len(samples)} rows but {len(advantages)} advantages")
    rollouts: dict[tuple[str, int], list[tuple[TrainingSample, RowAdvantage]]] = {}
    for sample, advantage in zip(samples, advantages, strict=True):
        if advantage is not None and _trained(sample.loss_mask).any():
            rollouts.setdefault((sample.rollout_id, sample.attempt), []).append((sample, advantage))
    listed = list(rollouts.values())
    parts = [part for part in np.array_split(np.arange(len(listed)), updates) if len(part)]
    steps = tuple(_weighted([listed[i] for i in part], reduction or Reduction()) for part in parts)
    kept = sum(len(step) for step in steps)
    return Plan(updates=steps, rollouts=len(listed), rows_left_out=len(samples) - kept)


def _trained(mask: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The mask without position 0, which nothing predicts."""
    out = mask.astype(bool)
    out[:1] = False
    return out


def _weighted(
    rollouts: Sequence[Sequence[tuple[TrainingSample, RowAdvantage]]], reduction: Reduction
) -> tuple[BatchRow, ...]:
    shares = [
        Share(rollout[0][0].group_id, sum(int(_trained(sample.loss_mask).sum()) for sample, _ in rollout))
        for rollout in rollouts
    ]
    rows = []
    for rollout, weight in zip(rollouts, reduction(shares), strict=True):
        for sample, advantage in rollout:
            on = _trained(sample.loss_mask)
            rows.append(
                BatchRow(
                    token_ids=sample.token_ids.astype(np.int64),
                    weights=on.astype(np.float32) * np.float32(weight),
                    rollout_logprobs=np.where(on, sample.logprobs, 0.0).astype(np.float32),
                    temperature=sample.temperature,
                    advantage=advantage,
                    sample=sample,
                )
            )
    return tuple(rows)


def supervised_rows(rendered: Sequence[RenderedRow]) -> tuple[BatchRow, ...]:
    """Rows of one supervised step: every trained token of the step has the same weight. Rows without one are left out."""
    masks = [_trained(row.loss_mask) for row in rendered]
    total = np.float32(max(1, sum(int(mask.sum()) for mask in masks)))
    return tuple(
        BatchRow(
            token_ids=row.token_ids.astype(np.int64),
            weights=mask.astype(np.float32) / total,
            rollout_logprobs=np.zeros(len(mask), dtype=np.float32),
            temperature=1.0,
        )
        for row, mask in zip(rendered, masks, strict=True)
        if mask.any()
    )


def micro_batches(rows: Sequence[BatchRow], max_tokens: int) -> list[Packing]:
    """Packs rows until `max_tokens` distinct tokens go through the model at once (a longer row is a micro-batch of its own).

    Rows are sorted by their tokens, so that those with a common beginning lie together and pay for it once.
    """
    return [padded(held) for held, _ in packed_rows(rows, max_tokens)]


def packed_rows(rows: Sequence[BatchRow], max_tokens: int) -> list[tuple[list[BatchRow], int]]:
    """The rows of each micro-batch that `micro_batches` makes, and their distinct tokens."""
    out: list[tuple[list[BatchRow], int]] = []
    tree, held = PrefixTree(), list[BatchRow]()
    for ids, row in sorted(((row.token_ids.tolist(), row) for row in rows), key=lambda pair: pair[0]):
        if held and len(tree) + len(ids) - tree.shared(ids) > max_tokens:
            out.append((held, len(tree)))
            tree, held = PrefixTree(), []
        tree.add(ids)
        held.append(row)
    return [*out, (held, len(tree))] if held else out


def padded(rows: Sequence[BatchRow]) -> Packing:
    """The micro-batch of rows, at least one, filled up on the right."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths.max()))
    token_ids, weights = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    logprobs, advantages = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        token_ids[i, :length] = row.token_ids
        weights[i, :length] = row.weights
        logprobs[i, :length] = row.rollout_logprobs
        if row.advantage is not None:
            own = row.advantage.tokens
            advantages[i, :length] = row.advantage.value if own is None else own
    temperature = np.array([row.temperature for row in rows], dtype=np.float32)
    batch = MicroBatch(token_ids, lengths, weights, logprobs, advantages, temperature)
    return Packing(batch, tuple(rows))
