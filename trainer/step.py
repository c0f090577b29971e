"""One training step on a batch of groups: advantages, weights, micro-batches, gradients, updates.

In: whole groups and the backend. Out: metrics and a record per trained row. It knows neither the service nor the disk.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from palestra.server.types import TrainingSample, TrajectoryGroup
from palestra.trainer.advantages import ESTIMATORS
from palestra.trainer.batches import BatchRow, Packing, Plan, micro_batches, plan_updates
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.records import RowRecord, row_record
from palestra.trainer.schedule import SCHEDULES
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.types import F32, Backend, ForwardStats, Loss, OptimStats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    optimizer_steps: int
    """How many; 0 where nothing could be trained."""
    metrics: dict[str, float]
    records: list[RowRecord]


class _Recorded:
    """A loss that keeps the log p it was asked about, one array per micro-batch, in their order."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.kept: list[F32] = []

    def __call__(
        self, logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.kept.append(logprobs.detach().cpu().numpy())
        return self._loss(logprobs, batch)


@dataclass(frozen=True, slots=True)
class _Update:
    stats: ForwardStats
    optim: OptimStats
    records: list[RowRecord]


def train_batch(
    backend: Backend,
    groups: Sequence[TrajectoryGroup],
    settings: TrainerSettings,
    *,
    policy_version: int,
    optimizer_steps: int,
) -> StepResult:
    """Trains on whole groups. `policy_version` is that of the present weights, `optimizer_steps` how many were taken before."""
    started = time.monotonic()
    samples = [sample for group in groups for sample in group.samples]
    advantages = ESTIMATORS[settings.algo.estimator](samples, std_normalise=settings.algo.std_normalise)
    plan = plan_updates(samples, advantages, settings.algo.updates_per_batch)
    updates = []
    for done, rows in enumerate(plan.updates):
        optim, total = settings.optim, settings.steps * settings.algo.updates_per_batch
        rate = SCHEDULES[optim.schedule](optimizer_steps + done + 1, optim.lr, optim.warmup_steps, total)
        updates.append(_update(backend, rows, settings, rate))
    metrics = _batch_metrics(plan, groups, policy_version)
    if updates:
        metrics |= _update_metrics(updates)
    took = time.monotonic() - started
    row_tokens = sum(len(row.token_ids) for rows in plan.updates for row in rows)
    metrics |= {"time/train_s": took, "train/tokens_per_s": row_tokens / took if took > 0 else 0.0}
    return StepResult(len(updates), metrics, [record for update in updates for record in update.records])


def _update(backend: Backend, rows: Sequence[BatchRow], settings: TrainerSettings, rate: float) -> _Update:
    algo = settings.algo
    packings = micro_batches(rows, settings.train.max_tokens_per_gpu)
    if algo.kl_coef:
        packings = _with_reference(backend, packings)
    loss = _Recorded(PolicyLoss(algo.clip_low, algo.clip_high, algo.kl_coef))
    stats = backend.forward_backward([packing.batch for packing in packings], loss)
    optim = backend.optim_step(rate)
    records = [
        record for packing, policy in zip(packings, loss.kept, strict=True) for record in _records(packing, policy)
    ]
    return _Update(stats, optim, records)


def _with_reference(backend: Backend, packings: Sequence[Packing]) -> list[Packing]:
    references = backend.logprobs([packing.batch for packing in packings], reference=True)
    return [
        dataclasses.replace(packing, batch=dataclasses.replace(packing.batch, ref_logprobs=reference))
        for packing, reference in zip(packings, references, strict=True)
    ]


def _records(packing: Packing, policy: F32) -> list[RowRecord]:
    out, reference = [], packing.batch.ref_logprobs
    for i, row in enumerate(packing.rows):
        if row.sample is not None and row.advantage is not None:
            ref = None if reference is None else reference[i]
            out.append(row_record(row.sample, row.advantage, policy[i], ref))
    return out


def _update_metrics(updates: Sequence[_Update]) -> dict[str, float]:
    """Ratios and differences to the engine are those of the first update, before this batch moved the weights."""
    first = updates[0].stats.sums
    tokens = max(1.0, first["tokens"])
    out = {
        "train/loss": float(np.mean([update.stats.loss for update in updates])),
        "train/grad_norm": float(np.mean([update.optim.grad_norm for update in updates])),
        "train/updates_skipped": float(sum(update.optim.skipped for update in updates)),
        "train/lr": updates[-1].optim.lr,
        "train/ratio/mean": first["ratio"] / tokens,
        "train/ratio/max": first["max_ratio"],
        "train/clip_fraction": first["clipped"] / tokens,
        "train/approx_kl/mean": first["kl_old"] / tokens,
        "train/abs_dlogp/mean": first["abs_dlogp"] / tokens,
        "train/abs_dlogp/max": first["max_abs_dlogp"],
        "train/nll/mean": first["nll"] / tokens,
        "train/tokens": float(sum(update.stats.sums["tokens"] for update in updates)),
        "train/model_tokens": float(sum(update.stats.tokens for update in updates)),
    }
    if "kl_ref" in first:
        out["train/kl_ref/mean"] = first["kl_ref"] / tokens
    return out


def _batch_metrics(plan: Plan, groups: Sequence[TrajectoryGroup], policy_version: int) -> dict[str, float]:
    rows = [row for rows in plan.updates for row in rows]
    ages = [age for row in rows if row.sample is not None for age in _ages(row.sample, policy_version)]
    count = sum(number for _, number in ages)
    rewards = [reward for group in groups for reward in group.rewards.values()]
    out = {
        "train/groups": float(len(groups)),
        "train/rollouts": float(plan.rollouts),
        "train/rows": float(len(rows)),
        "train/rows_left_out": float(plan.rows_left_out),
        "staleness/mean": sum(age * number for age, number in ages) / count if count else 0.0,
        "staleness/max": float(max((age for age, _ in ages), default=0)),
    }
    if rewards:
        out |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    return out


def _ages(sample: TrainingSample, policy_version: int) -> list[tuple[int, int]]:
    """(versions between sampling and training, how many trained tokens) of each span with trained tokens."""
    counts = ((span, int(sample.loss_mask[span.start : span.end].sum())) for span in sample.spans)
    return [(policy_version - span.version, number) for span, number in counts if number]
