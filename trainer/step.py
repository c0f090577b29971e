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

from palestra.server.types import TrajectoryGroup
from palestra.trainer.advantages import ESTIMATORS
from palestra.trainer.batches import BatchRow, Packing, Plan, micro_batches, plan_updates
from palestra.trainer.correction import RatioCorrection
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.records import RowRecord, row_record
from palestra.trainer.schedule import SCHEDULES
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.staleness import age_metrics, age_weights
from palestra.trainer.types import F32, Backend, ForwardStats, Loss, MicroBatch, OptimStats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    optimizer_steps: int
    """How many; 0 where nothing could be trained."""
    trained_tokens: int
    """With mask 1, in rows that were trained."""
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
    started, algo = time.monotonic(), settings.algo
    samples = [sample for group in groups for sample in group.samples]
    advantages = ESTIMATORS[algo.estimator](samples, std_normalise=algo.std_normalise)
    plan = plan_updates(samples, advantages, algo.updates_per_batch)
    if algo.age_decay < 1:
        plan = _aged(plan, policy_version, algo.age_decay)
    loss = loss_of(settings)
    updates = []
    for done, packings in enumerate(_packed(backend, plan, settings, loss)):
        optim, total = settings.optim, settings.steps * algo.updates_per_batch
        rate = SCHEDULES[optim.schedule](optimizer_steps + done + 1, optim.lr, optim.warmup_steps, total)
        updates.append(_update(backend, packings, loss, rate))
    rows = [row for update in plan.updates for row in update]
    metrics = _batch_metrics(plan, groups, policy_version)
    if updates:
        metrics |= _update_metrics(updates)
    if loss.correction is not None and updates:
        metrics |= _correction_metrics(updates)
    if algo.age_decay < 1 and rows:
        metrics["train/age_weight/mean"] = _age_weight(rows, policy_version, algo.age_decay)
    took = time.monotonic() - started
    metrics["train/tokens_per_s"] = sum(len(row.token_ids) for row in rows) / took if took > 0 else 0.0
    tokens = sum(int(np.count_nonzero(row.weights)) for row in rows)
    return StepResult(len(updates), tokens, metrics, [record for update in updates for record in update.records])


def loss_of(settings: TrainerSettings) -> PolicyLoss:
    """The run's loss. What nobody said about a correction follows from the schedule."""
    algo = settings.algo
    kind = algo.ratio_correction or ("tis" if settings.off_policy else "none")
    correction = None if kind == "none" else RatioCorrection(kind, algo.ratio_clip, algo.sequence_clip)
    return PolicyLoss(algo.clip_low, algo.clip_high, algo.kl_coef, correction)


def _aged(plan: Plan, policy_version: int, decay: float) -> Plan:
    """The plan with each token's weight made smaller by its age. The sum of weights falls with it: old tokens count for less, not the fresh
    ones beside them for more."""

    def aged(row: BatchRow) -> BatchRow:
        assert row.sample is not None, "rows of a plan come from samples"
        return dataclasses.replace(row, weights=row.weights * age_weights(row.sample, policy_version, decay))

    return dataclasses.replace(plan, updates=tuple(tuple(map(aged, rows)) for rows in plan.updates))


def _packed(backend: Backend, plan: Plan, settings: TrainerSettings, loss: PolicyLoss) -> list[list[Packing]]:
    """The micro-batches of each update. With a correction those after the first one know log p before the first: one forward pass over
    their rows. The first needs none, since it begins with those very weights."""
    packed = [micro_batches(rows, settings.train.max_tokens_per_gpu) for rows in plan.updates]
    if loss.correction is None:
        return packed
    return [*packed[:1], *(_with_logprobs(backend, packings) for packings in packed[1:])]


def _update(backend: Backend, packings: Sequence[Packing], loss: PolicyLoss, rate: float) -> _Update:
    if loss.kl_coef:
        packings = _with_logprobs(backend, packings, reference=True)
    recorded = _Recorded(loss)
    stats = backend.forward_backward([packing.batch for packing in packings], recorded)
    optim = backend.optim_step(rate)
    records = [
        record for packing, policy in zip(packings, recorded.kept, strict=True) for record in _records(packing, policy)
    ]
    return _Update(stats, optim, records)


def _with_logprobs(backend: Backend, packings: Sequence[Packing], *, reference: bool = False) -> list[Packing]:
    """The micro-batches with log p of the present weights as `old_logprobs`, or of the reference as `ref_logprobs`."""

    def put(batch: MicroBatch, values: F32) -> MicroBatch:
        if reference:
            return dataclasses.replace(batch, ref_logprobs=values)
        return dataclasses.replace(batch, old_logprobs=values)

    found = backend.logprobs([packing.batch for packing in packings], reference=reference)
    return [
        dataclasses.replace(packing, batch=put(packing.batch, values))
        for packing, values in zip(packings, found, strict=True)
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
        "train/approx_kl/mean": first["kl_rollout"] / tokens,
        "train/abs_dlogp/mean": first["abs_dlogp"] / tokens,
        "train/abs_dlogp/max": first["max_abs_dlogp"],
        "train/nll/mean": first["nll"] / tokens,
        "train/tokens": float(sum(update.stats.sums["tokens"] for update in updates)),
        "train/model_tokens": float(sum(update.stats.tokens for update in updates)),
    }
    if "kl_ref" in first:
        out["train/kl_ref/mean"] = first["kl_ref"] / tokens
    return out


def _correction_metrics(updates: Sequence[_Update]) -> dict[str, float]:
    """Of all tokens of the batch: its ratios are those of the weights before the first update, whichever update a token is in."""
    sums = [update.stats.sums for update in updates]
    tokens = max(1.0, sum(each["tokens"] for each in sums))
    return {
        "train/ratio_correction/mean": sum(each["correction"] for each in sums) / tokens,
        "train/ratio_correction/max": max(each["max_correction"] for each in sums),
        "train/ratio_correction/clipped_share": sum(each["correction_cut"] for each in sums) / tokens,
        "train/ratio_correction/masked_tokens": sum(each["correction_masked"] for each in sums),
    }


def _age_weight(rows: Sequence[BatchRow], policy_version: int, decay: float) -> float:
    """Mean over the trained tokens of what age makes of their weight."""
    found = [age_weights(row.sample, policy_version, decay)[row.weights != 0] for row in rows if row.sample is not None]
    return float(np.concatenate(found).mean())


def _batch_metrics(plan: Plan, groups: Sequence[TrajectoryGroup], policy_version: int) -> dict[str, float]:
    rows = [row for rows in plan.updates for row in rows]
    rewards = [reward for group in groups for reward in group.rewards.values()]
    out = {
        "train/groups": float(len(groups)),
        "train/rollouts": float(plan.rollouts),
        "train/rows": float(len(rows)),
        "train/rows_left_out": float(plan.rows_left_out),
        **age_metrics((row.sample for row in rows if row.sample is not None), policy_version),
    }
    if rewards:
        out |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    return out
