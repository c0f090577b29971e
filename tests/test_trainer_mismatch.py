"""How far trainer and engine are apart, by who sampled: against plain arithmetic, and on real steps with the old weights held beside."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.server.types import TrainingSample, TrajectoryGroup
from palestra.trainer.batches import BatchRow, Packing, micro_batches
from palestra.trainer.klreward import penalised
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.mismatch import compared, mismatch_metrics, token_ages
from palestra.trainer.step import train_batch
from palestra.trainer.types import F32, MicroBatch
from tests.test_trainer_correction import aged
from tests.test_trainer_loop import REPLY, SIZE, settings_for
from tests.test_trainer_math import row
from tests.test_trainer_schedules import Watched, moved, stale_groups
from tests.tiny import make_tiny_llama


def packed(samples: Sequence[TrainingSample]) -> Packing:
    """One micro-batch of rows whose trained tokens all weigh alike."""
    rows = [
        BatchRow(
            token_ids=sample.token_ids.astype(np.int64),
            weights=sample.loss_mask.astype(np.float32),
            rollout_logprobs=np.where(sample.loss_mask, sample.logprobs, 0).astype(np.float32),
            temperature=1.0,
            sample=sample,
        )
        for sample in samples
    ]
    (packing,) = micro_batches(rows, 10_000)
    return packing


def against(packing: Packing, gaps: dict[str, list[float]]) -> F32:
    """[B, S] log p that is the engine's and so much more, by rollout, at its trained tokens; far off elsewhere."""
    out = np.full(packing.batch.weights.shape, 99.0, dtype=np.float32)
    for i, each in enumerate(packing.rows):
        assert each.sample is not None
        at = np.flatnonzero(packing.batch.weights[i])
        out[i, at] = packing.batch.rollout_logprobs[i, at] + np.array(gaps[each.sample.rollout_id], dtype=np.float32)
    return out


MIXED = [aged("a", [(5, 3, 5), (7, 5, 7)], length=7), aged("b", [(6, 3, 6)], length=6, mask=(4,))]
"""Under version 7: two tokens of age 2, two of age 0; two of age 1."""
NEAR = 1e-6
GAPS = {"a": [0.5, -0.3, 0.02, -0.04], "b": [0.1, 0.2]}


def test_figures_by_who_sampled() -> None:
    packing = packed(MIXED)
    part = compared(packing, against(packing, GAPS), 7, first=True)
    assert part is not None
    told = mismatch_metrics([part])
    assert told["mismatch/engine/tokens/count"] == 2
    assert told["mismatch/engine/dlogp/mean"] == pytest.approx(-0.01, abs=NEAR)
    assert told["mismatch/engine/abs_dlogp/mean"] == pytest.approx(0.03, abs=NEAR)
    assert told["mismatch/engine/abs_dlogp/max"] == pytest.approx(0.04, abs=NEAR)
    assert told["mismatch/stale/dlogp/mean"] == pytest.approx(0.5 / 4, abs=NEAR)
    assert told["mismatch/stale/age_2/abs_dlogp/mean"] == pytest.approx(0.4, abs=NEAR)
    assert told["mismatch/stale/age_1/abs_dlogp/mean"] == pytest.approx(0.15, abs=NEAR)
    assert told["mismatch/stale/age_1/k3/mean"] == pytest.approx(
        (math.exp(0.1) - 1.1 + math.exp(0.2) - 1.2) / 2, abs=NEAR
    )
    ratios = np.exp([gap for gaps in GAPS.values() for gap in gaps])
    assert told["mismatch/k1/mean"] == pytest.approx(-0.48 / 6, abs=NEAR)
    assert told["mismatch/ess/share"] == pytest.approx(sum(ratios) ** 2 / (6 * sum(ratios**2)), abs=NEAR)
    assert told["mismatch/ratio/p50"] == pytest.approx((math.exp(0.02) + math.exp(0.1)) / 2, abs=NEAR)
    assert (
        ratios.min()
        < told["mismatch/ratio/p01"]
        < told["mismatch/ratio/p50"]
        < told["mismatch/ratio/p99"]
        < ratios.max()
    )
    assert not [name for name in told if "held" in name or "age_0" in name]


def test_ages_of_tokens() -> None:
    assert token_ages(MIXED[0], 7).tolist() == [-1, -1, -1, 2, 2, 0, 0]
    assert token_ages(MIXED[0], 6).tolist() == [-1, -1, -1, 1, 1, 0, 0], "versions of the future count as present"


def test_later_updates_are_told_only_where_the_weights_before_the_step_are_known() -> None:
    packing = packed(MIXED)
    policy = against(packing, GAPS)
    assert compared(packing, policy, 7, first=False) is None
    assert mismatch_metrics([]) == {}
    old = against(packing, {"a": [0.0, 0.0, 0.01, 0.01], "b": [0.0, 0.0]})
    known = dataclasses.replace(packing, batch=dataclasses.replace(packing.batch, old_logprobs=old))
    part = compared(known, policy, 7, first=False)
    assert part is not None
    told = mismatch_metrics([part], [part])
    assert told["mismatch/engine/dlogp/mean"] == pytest.approx(0.01, abs=1e-6)
    assert told["mismatch/held/dlogp/mean"] == pytest.approx(-0.01, abs=1e-6)
    assert told["mismatch/held/engine/mean"] == pytest.approx(0.01, abs=1e-6)
    assert told["mismatch/held/stale/mean"] == pytest.approx(-0.02, abs=1e-6)


class Reference:
    """A backend of which only the reference is asked."""

    def __init__(self, value: float) -> None:
        self.value = value

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        assert reference
        return [np.where(batch.weights != 0, np.float32(self.value), np.float32(7.0)) for batch in batches]


def test_a_rollout_pays_once_for_all_of_its_rows() -> None:
    """Engine's log p is -1, the reference's -1.5: half a nat for each of 3 + 2 trained tokens. Nobody pays without a reward."""
    rows = [row("a", 3, 1.0), row("b", 4, None), row("a", 2, 1.0, branch=1), row("c", 0, 2.0), row("d", 1, 0.0)]
    backend: Any = Reference(-1.5)
    lower, told = penalised(backend, rows, 0.1, 100)
    assert [each.reward for each in lower] == [
        pytest.approx(0.75),
        None,
        pytest.approx(0.75),
        2.0,
        pytest.approx(-0.05),
    ]
    assert lower[0].reward == lower[2].reward, "rows of a rollout must agree to the bit"
    assert [each.rollout_id for each in lower] == ["a", "b", "a", "c", "d"]
    assert told == {"reward/kl_penalty/mean": pytest.approx(0.15), "train/kl_ref/mean": pytest.approx(0.5)}
    assert penalised(backend, [row("b", 4, None)], 0.1, 100)[1] == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def sampled(groups: Sequence[TrajectoryGroup]) -> dict[str, TrainingSample]:
    return {sample.rollout_id: sample for group in groups for sample in group.samples}


@pytest.mark.walk
def test_staleness_and_the_engine_s_part_are_the_whole_where_the_old_weights_are_held(model: Path) -> None:
    """Version 0 sampled; the test holds its weights. What the step tells of age 3 is what was learned and what the engine did."""
    groups, settings = stale_groups(model), settings_for(model, off_policy=True)
    backend = moved(Watched(settings))
    assert isinstance(backend, Watched)
    result = train_batch(backend, groups, settings, policy_version=3, optimizer_steps=3)
    (batches,) = backend.updates
    old = MegatronBackend.from_folder(model).logprobs(batches)
    present = {record.rollout_id: record.policy_logprobs for record in result.records}
    held = np.concatenate([each[batch.weights != 0] for each, batch in zip(old, batches, strict=True)]).astype(float)
    engine = held - np.concatenate([batch.rollout_logprobs[batch.weights != 0] for batch in batches])
    whole = np.concatenate([present[name] - each.logprobs for name, each in sampled(groups).items()])
    whole = whole[np.isfinite(whole)]
    learned = np.concatenate([values[np.isfinite(values)] for values in present.values()]).sum() - held.sum()
    told, tokens = result.metrics, 2 * SIZE * REPLY
    assert told["mismatch/stale/tokens/count"] == tokens
    assert told["mismatch/stale/age_3/dlogp/mean"] == pytest.approx(whole.mean(), abs=1e-6)
    assert told["mismatch/stale/dlogp/mean"] == pytest.approx((learned + engine.sum()) / tokens, abs=1e-6)
    assert abs(engine).max() < 1e-4 < told["mismatch/stale/abs_dlogp/mean"]
    assert "mismatch/engine/dlogp/mean" not in told, "nothing is of the present version"
    assert 0 < told["mismatch/ess/share"] < 1


@pytest.mark.walk
def test_within_a_batch_both_parts_are_told(model: Path) -> None:
    """All tokens are fresh; the second update trains under weights that the first one moved."""
    settings = settings_for(model, algo={"updates_per_batch": 2, "ratio_correction": "tis"})
    told = train_batch(Watched(settings), stale_groups(model), settings, policy_version=0, optimizer_steps=0).metrics
    assert told["mismatch/engine/tokens/count"] == 2 * SIZE * REPLY
    assert told["mismatch/engine/abs_dlogp/max"] < 1e-4, "law 8"
    assert told["mismatch/held/dlogp/mean"] == pytest.approx(
        told["mismatch/held/stale/mean"] + told["mismatch/held/engine/mean"], abs=1e-9
    )
    assert abs(told["mismatch/held/stale/mean"]) > 10 * abs(told["mismatch/held/engine/mean"])
    assert told["train/ratio_correction/ess_share"] == pytest.approx(1, abs=1e-6)


@pytest.mark.walk
def test_the_penalty_in_the_reward_changes_advantages_before_they_are_made(model: Path) -> None:
    algo = {"kl_coef": 0.5, "kl_in": "reward", "std_normalise": False}
    settings, groups = settings_for(model, algo=algo), stale_groups(model)
    backend = Watched(settings)
    backend.freeze_reference()
    moved(backend)
    result = train_batch(backend, groups, settings, policy_version=0, optimizer_steps=0)
    assert result.metrics["train/kl_ref/mean"] == pytest.approx(0, abs=1e-5), "the reference is what sampled"
    plain = settings_for(model, algo={"std_normalise": False})
    without = train_batch(moved(Watched(plain)), groups, plain, policy_version=0, optimizer_steps=0)
    for ours, theirs in zip(result.records, without.records, strict=True):
        assert ours.advantage.value == pytest.approx(theirs.advantage.value, abs=1e-3)
    far = Watched(settings)
    moved(far)
    far.freeze_reference()
    charged = train_batch(far, groups, settings, policy_version=0, optimizer_steps=0)
    paid = {}
    (batches,) = far.updates
    (reference,) = [far.forwards[0]]
    for values, batch in zip(reference, batches, strict=True):
        for i in range(len(values)):
            on = batch.weights[i] != 0
            paid[tuple(batch.token_ids[i].tolist())] = float((batch.rollout_logprobs[i] - values[i])[on].sum())
    assert charged.metrics["reward/kl_penalty/mean"] == pytest.approx(0.5 * np.mean(list(paid.values())), rel=1e-4)
    assert "train/kl_ref/mean" in charged.metrics
    assert charged.metrics["reward/mean"] == without.metrics["reward/mean"], "rewards are told as they were given"
    assert [r.advantage.value for r in charged.records] != [r.advantage.value for r in without.records]
