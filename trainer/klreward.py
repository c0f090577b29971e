"""A KL penalty in the reward: each rollout pays for what it said that the reference would not have said.

In: rows, and a backend that keeps a reference. Out: the rows with lower rewards, and metrics. It waits for one forward pass of the
reference. The penalty is coef * sum over the rollout's trained tokens of an estimate of KL(sampling policy || reference), as in RLHF's
reward (Ziegler et al. 2019, equation 2; Ouyang et al. 2022): advantages are made of what is left.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from palestra.server.types import TrainingSample
from palestra.trainer.batches import BatchRow, micro_batches
from palestra.trainer.types import F32, Backend

Rollout = tuple[str, int]
"""rollout_id and attempt."""


def penalised(
    backend: Backend, samples: Sequence[TrainingSample], coef: float, max_tokens: int
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Rows in their order, with what `coef` times the k1 estimate leaves of the reward: log p of the engine that sampled less that of the
    reference. A rollout pays once, for all of its rows; without a reward it stays without."""
    rows = [_row(sample) for sample in samples if sample.reward is not None and _on(sample).any()]
    packings = micro_batches(rows, max_tokens)
    found = backend.logprobs([packing.batch for packing in packings], reference=True)
    paid: dict[Rollout, float] = defaultdict(float)
    tokens = 0
    for packing, reference in zip(packings, found, strict=True):
        for row, theirs in zip(packing.rows, reference, strict=True):
            assert row.sample is not None, "made above from samples"
            paid[_rollout(row.sample)] += _distance(row, theirs)
            tokens += int(np.count_nonzero(row.weights))
    lower = [
        sample
        if sample.reward is None
        else dataclasses.replace(sample, reward=sample.reward - coef * paid.get(_rollout(sample), 0.0))
        for sample in samples
    ]
    if not tokens:
        return lower, {}
    mean = float(np.mean([coef * each for each in paid.values()]))
    return lower, {"reward/kl_penalty/mean": mean, "train/kl_ref/mean": sum(paid.values()) / tokens}


def _rollout(sample: TrainingSample) -> Rollout:
    return sample.rollout_id, sample.attempt


def _on(sample: TrainingSample) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Trained tokens; nothing predicts the first one of a row."""
    on = sample.loss_mask.astype(bool)
    on[:1] = False
    return on


def _row(sample: TrainingSample) -> BatchRow:
    on = _on(sample)
    return BatchRow(
        token_ids=sample.token_ids.astype(np.int64),
        weights=on.astype(np.float32),
        rollout_logprobs=np.where(on, sample.logprobs, 0.0).astype(np.float32),
        temperature=sample.temperature,
        sample=sample,
    )


def _distance(row: BatchRow, reference: F32) -> float:
    """Sum of k1 over the row's trained tokens."""
    moved = row.rollout_logprobs - reference[: len(row.weights)]
    return float(np.where(row.weights != 0, moved, 0.0).sum(dtype=np.float64))
