"""What a training step tells of itself: names are `area/name/stat`. Pure.

In: what the updates of a batch were and what their losses summed up. Out: metrics. Nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from palestra.server.types import TrajectoryGroup
from palestra.trainer.batches import BatchRow, Packing, Plan
from palestra.trainer.mismatch import compared, mismatch_metrics
from palestra.trainer.staleness import age_metrics, age_weights
from palestra.trainer.sums import add_sums
from palestra.trainer.types import F32, ForwardStats, OptimStats


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of a batch."""

    stats: ForwardStats
    optim: OptimStats
    packings: Sequence[Packing]
    policy: Sequence[F32]
    """Per micro-batch [B, S]: log p of its own forward pass."""


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
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
        "train/approx_kl/mean": first["kl_rollout"] / tokens,
        "train/abs_dlogp/mean": first["abs_dlogp"] / tokens,
        "train/abs_dlogp/max": first["max_abs_dlogp"],
        "train/nll/mean": first["nll"] / tokens,
        "train/tokens": float(sum(update.stats.sums["tokens"] for update in updates)),
        "train/model_tokens": float(sum(update.stats.tokens for update in updates)),
    }
    if "clipped" in first:
        out["train/clip_fraction"] = first["clipped"] / tokens
        every = max(1.0, sum(update.stats.sums["tokens"] for update in updates))
        out["train/clip_fraction/all"] = sum(update.stats.sums["clipped"] for update in updates) / every
    for name in ("kl_ref", "entropy"):
        if name in first:
            out[f"train/{name}/mean"] = first[name] / tokens
    sums = [update.stats.sums for update in updates]
    if "opsm_masked" in first:
        out["train/opsm/masked_share"] = _total(sums, "opsm_masked") / max(1.0, _total(sums, "tokens"))
    return out | _own(_together(sums), max(1.0, _total(sums, "tokens")))


def _together(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all updates: largest values are compared, others added up."""
    together: dict[str, float] = {}
    for each in sums:
        add_sums(together, each)
    return dict(sorted(together.items()))


def _own(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """What a loss of the user's summed up, by token; its largest values as they are."""
    means = {name: value / tokens for name, value in sums.items() if name.startswith("own/")}
    largest = {name[len("max_own/") :]: value for name, value in sums.items() if name.startswith("max_own/")}
    return {
        **{f"train/{name}/mean": value for name, value in means.items()},
        **{f"train/own/{name}/max": value for name, value in largest.items()},
    }


def correction_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Of all tokens of the batch: its ratios are those of the weights before the first update, whichever update a token is in."""
    sums = [update.stats.sums for update in updates]
    tokens = max(1.0, _total(sums, "tokens"))
    square = _total(sums, "correction_square")
    return {
        "train/ratio_correction/mean": _total(sums, "correction") / tokens,
        "train/ratio_correction/max": max(each["max_correction"] for each in sums),
        "train/ratio_correction/clipped_share": _total(sums, "correction_cut") / tokens,
        "train/ratio_correction/masked_tokens": _total(sums, "correction_masked"),
        "train/ratio_correction/vetoed_rows": _total(sums, "correction_vetoed"),
        "train/ratio_correction/ess_share": _total(sums, "correction_weight") ** 2 / (tokens * square)
        if square
        else 0.0,
    }


def _total(sums: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(each[name] for each in sums)


def mismatch_of(updates: Sequence[Update], policy_version: int) -> dict[str, float]:
    """`mismatch/*` of the tokens whose log p before the step is known: those of the first update, and all where a correction is on."""
    told = [
        [
            compared(packing, policy, policy_version, first=at == 0)
            for packing, policy in zip(u.packings, u.policy, strict=True)
        ]
        for at, u in enumerate(updates)
    ]
    first, later = ([each for part in parts for each in part if each is not None] for parts in (told[:1], told[1:]))
    return mismatch_metrics([*first, *later], later)


def age_weight(rows: Sequence[BatchRow], policy_version: int, decay: float) -> float:
    """Mean over the trained tokens of what age makes of their weight."""
    found = [age_weights(row.sample, policy_version, decay)[row.weights != 0] for row in rows if row.sample is not None]
    return float(np.concatenate(found).mean())


def batch_metrics(plan: Plan, groups: Sequence[TrajectoryGroup], policy_version: int) -> dict[str, float]:
    """What was trained, how old it was, and the rewards as they were given."""
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
