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
from palestra.trainer.advantages import batch_advantages
from palestra.trainer.batches import BatchRow, Packing, Plan, micro_batches, plan_updates
from palestra.trainer.correction import RatioCorrection
from palestra.trainer.klreward import penalised
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.losses.own import load_loss
from palestra.trainer.records import RowRecord, row_record
from palestra.trainer.reductions import reduction_of
from palestra.trainer.schedule import SCHEDULES
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.staleness import age_weights
from palestra.trainer.stepmetrics import (
    Update,
    age_weight,
    batch_metrics,
    correction_metrics,
    mismatch_of,
    update_metrics,
)
from palestra.trainer.types import F32, Backend, Loss, MicroBatch

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
    samples, paid = [sample for group in groups for sample in group.samples], dict[str, float]()
    if algo.kl_coef and algo.kl_in == "reward":
        samples, paid = penalised(backend, samples, algo.kl_coef, settings.train.max_tokens_per_gpu)
    advantages = batch_advantages(samples, algo)
    plan = plan_updates(samples, advantages.rows, algo.updates_per_batch, reduction_of(algo))
    if algo.age_decay < 1:
        plan = _aged(plan, policy_version, algo.age_decay)
    loss = loss_of(settings)
    updates = []
    for done, packings in enumerate(_packed(backend, plan, settings, loss)):
        optim, total = settings.optim, settings.steps * algo.updates_per_batch
        rate = SCHEDULES[optim.schedule](optimizer_steps + done + 1, optim.lr, optim.warmup_steps, total)
        updates.append(_update(backend, packings, loss, rate))
    rows = [row for update in plan.updates for row in update]
    metrics = batch_metrics(plan, groups, policy_version) | paid | advantages.metrics
    if updates:
        metrics |= update_metrics(updates) | mismatch_of(updates, policy_version)
    if loss.correction is not None and updates:
        metrics |= correction_metrics(updates)
    if algo.age_decay < 1 and rows:
        metrics["train/age_weight/mean"] = age_weight(rows, policy_version, algo.age_decay)
    took = time.monotonic() - started
    metrics["train/tokens_per_s"] = sum(len(row.token_ids) for row in rows) / took if took > 0 else 0.0
    tokens = sum(int(np.count_nonzero(row.weights)) for row in rows)
    records = [
        record
        for update in updates
        for packing, policy in zip(update.packings, update.policy, strict=True)
        for record in _records(packing, policy)
    ]
    return StepResult(len(updates), tokens, metrics, records)


def loss_of(settings: TrainerSettings) -> PolicyLoss:
    """The run's loss. What nobody said about a correction follows from the schedule, or from a veto, which is part of one.

    Raises:
        TrainerError: `algo.loss` names a loss of the user's that is not there, or that is none.
    """
    algo = settings.algo
    kind, (low, high) = algo.correction(settings.off_policy), algo.clip
    correction = None
    if kind != "none":
        correction = RatioCorrection(kind, algo.ratio_clip, algo.sequence_clip, algo.ratio_floor, algo.veto_floor)
    own = load_loss(algo.loss, _beside(settings)) if ":" in algo.loss else None
    return PolicyLoss(
        low,
        high,
        algo.kl_coef if algo.kl_in == "loss" else 0.0,
        correction,
        kind=algo.loss,
        dual_clip=algo.dual_clip,
        kl_estimator=algo.kl_estimator or "k3",
        entropy_coef=algo.entropy_coef,
        opsm_delta=algo.opsm_delta,
        own=own,
    )


def _beside(settings: TrainerSettings) -> frozenset[str]:
    """What a run's batches hold besides what all have."""
    algo, train = settings.algo, settings.train
    reference = algo.kl_coef > 0 and algo.kl_in == "loss"
    entropy = train.backend == "megatron" and (algo.entropy_coef > 0 or train.entropy)
    return frozenset((["ref_logprobs"] if reference else []) + (["entropy"] if entropy else []))


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


def _update(backend: Backend, packings: Sequence[Packing], loss: PolicyLoss, rate: float) -> Update:
    if loss.kl_coef:
        packings = _with_logprobs(backend, packings, reference=True)
    recorded = _Recorded(loss)
    stats = backend.forward_backward([packing.batch for packing in packings], recorded)
    return Update(stats, backend.optim_step(rate), packings, recorded.kept)


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
