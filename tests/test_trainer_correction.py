"""What another policy sampled: weights of single tokens, the decoupled surrogate, ages. Golden vectors, worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.types import TrainingSample, VersionSpan
from palestra.trainer.correction import Kind, RatioCorrection
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.staleness import age_metrics, age_weights
from palestra.trainer.timing import StepClock
from tests.test_trainer_math import policy_batch, row

KINDS: tuple[Kind, ...] = ("tis", "mask", "seq_mask", "seq_tis", "seq_mis", "geo_mask")
RATIOS = [
    [0.25, 0.6, 1.0, 1.9, 4.0],
    [1.5, 1 / 1.5, 1.0, 3.0, 1 / 3.0],
    [1.3, 1.3, 1.3, 1.3, 50.0],
    [0.8, 0.8, 0.8, 50.0, 50.0],
]
"""old / rollout. What stands at 50 in the last two rows is not trained."""
ON = torch.tensor([[True] * 5, [True] * 5, [True] * 4 + [False], [True] * 3 + [False] * 2])


def corrected(
    kind: Kind, bound: float = 2.0, *, floor: float | None = None, veto: float | None = None
) -> tuple[list[list[float]], dict[str, float]]:
    old = torch.tensor(RATIOS, dtype=torch.float64).log() - 2
    weights, sums = RatioCorrection(kind, bound, 1.1, floor, veto)(old, torch.full_like(old, -2.0), ON)
    trained = [
        [round(float(w), 6) for w, on in zip(*pair, strict=True) if on] for pair in zip(weights, ON, strict=True)
    ]
    return trained, {name: float(value) for name, value in sums.items()}


def test_truncated() -> None:
    weights, sums = corrected("tis")
    assert weights == [
        [0.25, 0.6, 1.0, 1.9, 2.0],
        [1.5, 0.666667, 1.0, 2.0, 0.333333],
        [1.3] * 4,
        [0.8] * 3,
    ]
    total = 7.75 + (1.5 + 1 / 1.5 + 1 + 3 + 1 / 3) + 5.2 + 2.4
    assert sums == pytest.approx(
        {
            "correction": total,
            "max_correction": 4.0,
            "correction_cut": 2,
            "correction_masked": 0,
            "correction_vetoed": 0,
            "correction_weight": total - 3,
            "correction_square": 0.0625 + 0.36 + 1 + 3.61 + 4 + 2.25 + 4 / 9 + 1 + 4 + 1 / 9 + 4 * 1.69 + 3 * 0.64,
        }
    )


def test_masked() -> None:
    weights, sums = corrected("mask")
    assert weights == [
        [0.0, 0.6, 1.0, 1.9, 0.0],
        [1.5, 0.666667, 1.0, 0.0, 0.0],
        [1.3] * 4,
        [0.8] * 3,
    ]
    assert (sums["correction_cut"], sums["correction_masked"]) == (4, 4)


def test_rows_are_masked_by_their_geometric_mean() -> None:
    """The first row's is (0.25 * 0.6 * 1.9 * 4) ** (1/5) = 1.026, the second's is 1: both stay. What is not trained does not count."""
    weights, sums = corrected("seq_mask")
    assert weights == [
        [0.25, 0.6, 1.0, 1.9, 2.0],
        [1.5, 0.666667, 1.0, 2.0, 0.333333],
        [0.0] * 4,
        [0.0] * 3,
    ]
    assert (sums["correction_cut"], sums["correction_masked"]) == (9, 7)


def test_rows_weigh_by_the_product_of_their_ratios() -> None:
    """0.25 * 0.6 * 1.9 * 4 = 1.14; 1.5 / 1.5 * 3 / 3 = 1; 1.3 ** 4 = 2.8561, above the bound; 0.8 ** 3 = 0.512."""
    weights, sums = corrected("seq_tis")
    assert weights == [[1.14] * 5, [1.0] * 5, [2.0] * 4, [0.512] * 3]
    assert (sums["correction_cut"], sums["correction_masked"]) == (4, 0)
    weights, sums = corrected("seq_mis")
    assert weights == [[1.14] * 5, [1.0] * 5, [0.0] * 4, [0.512] * 3]
    assert (sums["correction_cut"], sums["correction_masked"]) == (4, 4)
    weights, sums = corrected("seq_mis", 3.0, floor=0.6)
    assert weights == [[1.14] * 5, [1.0] * 5, [2.8561] * 4, [0.0] * 3]
    assert (sums["correction_cut"], sums["correction_masked"]) == (3, 3)


def test_rows_left_out_by_their_geometric_mean_alone() -> None:
    weights, sums = corrected("geo_mask")
    assert weights == [[1.0] * 5, [1.0] * 5, [0.0] * 4, [0.0] * 3]
    assert (sums["correction_cut"], sums["correction_masked"]) == (7, 7)
    assert sums["correction_weight"] == sums["correction_square"] == 10


def test_a_floor_of_its_own() -> None:
    weights, _ = corrected("mask", floor=0.3)
    assert weights[:2] == [[0.0, 0.6, 1.0, 1.9, 0.0], [1.5, 0.666667, 1.0, 0.0, 0.333333]]


def test_one_token_vetoes_its_row() -> None:
    """0.25 in the first row; what is not trained has no say, and the others are as they were."""
    weights, sums = corrected("tis", veto=0.3)
    assert weights == [[0.0] * 5, corrected("tis")[0][1], [1.3] * 4, [0.8] * 3]
    assert (sums["correction_masked"], sums["correction_vetoed"]) == (5, 1)
    assert sums["correction_cut"] == 6, "the five, and the 3.0 of the second row"
    weights, sums = corrected("seq_mask", veto=0.79)
    assert (sums["correction_vetoed"], weights[2:]) == (2, [[0.0] * 4, [0.0] * 3])
    assert sums["correction_masked"] == 17
    old = torch.tensor([[-400.0, -1.0]])
    _, sums_ = RatioCorrection("tis", veto=1e-30)(old, torch.full_like(old, -1.0), torch.ones(1, 2, dtype=torch.bool))
    assert int(sums_["correction_vetoed"]) == 1, "also below what ratios are bounded to"


@pytest.mark.parametrize("kind", KINDS)
def test_ratios_without_measure_stay_finite(kind: Kind) -> None:
    old, rollout = torch.tensor([[-1.0, -500.0, -1.0]]), torch.tensor([[-900.0, -1.0, -1.0]])
    weights, sums = RatioCorrection(kind)(old, rollout, torch.ones(1, 3, dtype=torch.bool))
    assert torch.isfinite(weights).all()
    assert all(torch.isfinite(value.double()) for value in sums.values())


@pytest.mark.parametrize("kind", KINDS)
def test_law_8_what_the_present_weights_sampled_needs_no_correction(kind: Kind) -> None:
    logprobs, batch = policy_batch(2)
    batch["rollout_logprobs"] = logprobs.clone()
    logprobs.requires_grad_()
    loss, sums = PolicyLoss(correction=RatioCorrection(kind))(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -batch["weights"] * batch["advantages"])
    assert float(sums["ratio"]) == float(sums["correction"]) == float(sums["tokens"])
    assert float(sums["kl_rollout"]) == float(sums["clipped"]) == float(sums["correction_cut"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_first_update_the_gradient_is_the_weighted_policy_gradient(kind: Kind) -> None:
    """However far the sampling policy is away: the clip, which is about this step's own movement, does not touch it."""
    logprobs, batch = policy_batch(4)
    batch["rollout_logprobs"] = logprobs + 1.5 * torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
    correction = RatioCorrection(kind, 1.5, 1.2)
    factors, _ = correction(logprobs, batch["rollout_logprobs"], batch["weights"] != 0)
    logprobs.requires_grad_()
    loss, sums = PolicyLoss(0.01, 0.01, correction=correction)(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -batch["weights"] * factors * batch["advantages"])
    assert float(sums["clipped"]) == 0
    assert float(sums["kl_rollout"]) > 0, "the distance to the policy that sampled is still told"
    assert float(sums["correction_cut"]) > 0


def test_the_decoupled_surrogate_token_by_token() -> None:
    logprobs, batch = policy_batch(5)
    old = batch["old_logprobs"] = logprobs + 0.6 * torch.randn(
        logprobs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    low, high, bound, coef = 0.2, 0.3, 1.4, 0.7
    expected, cut = 0.0, 0
    for index in np.ndindex(*logprobs.shape):
        w, a = float(batch["weights"][index]), float(batch["advantages"][index])
        if w == 0:
            continue
        ratio = math.exp(float(logprobs[index] - old[index]))
        behaviour = math.exp(float(old[index] - batch["rollout_logprobs"][index]))
        cut += behaviour > bound
        r = float(batch["ref_logprobs"][index] - logprobs[index])
        surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        expected += w * min(bound, behaviour) * (-surrogate + coef * (math.exp(r) - 1 - r))
    loss, sums = PolicyLoss(low, high, coef, RatioCorrection("tis", bound))(logprobs, batch)
    assert float(loss) == pytest.approx(expected)
    assert int(sums["correction_cut"]) == cut > 0
    assert int(sums["clipped"]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_difference(kind: Kind) -> None:
    logprobs, batch = policy_batch(6)
    batch["old_logprobs"] = logprobs + 0.1
    loss = PolicyLoss(0.1, 0.2, 0.5, RatioCorrection(kind, 1.2, 1.05))
    assert torch.autograd.gradcheck(lambda x: loss(x, batch)[0], logprobs.requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_behind_the_mask_reaches_loss_or_gradient(kind: Kind) -> None:
    logprobs, batch = policy_batch(3)
    batch["old_logprobs"] = logprobs.clone()
    off = batch["weights"] == 0
    for name in ("rollout_logprobs", "ref_logprobs", "old_logprobs"):
        batch[name] = torch.where(off, -1e4, batch[name])
    logprobs.requires_grad_()
    loss, sums = PolicyLoss(kl_coef=0.1, correction=RatioCorrection(kind))(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(gradient).all()
    assert (gradient[off] == 0).all()
    assert all(torch.isfinite(value.double()) for value in sums.values())


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.floats(-8, 8), min_size=1, max_size=12),
    st.floats(1.01, 10),
)
def test_no_weight_is_above_the_bound_and_none_is_negative(kind: Kind, moved: list[float], bound: float) -> None:
    old = torch.tensor([moved], dtype=torch.float64)
    weights, sums = RatioCorrection(kind, bound, 1.5)(
        old, torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool)
    )
    assert float(weights.max()) <= bound * (1 + 1e-12)
    assert float(weights.min()) >= 0
    assert int((weights == 0).sum()) == int(sums["correction_masked"]) <= int(sums["correction_cut"])
    kept = weights != 0
    if kind in ("seq_tis", "seq_mis"):
        right = old.sum().clamp(-20, 20).exp().clamp(max=bound).expand_as(old)
    elif kind == "geo_mask":
        right = torch.ones_like(old)
    else:
        right = old.exp().clamp(max=bound)
    torch.testing.assert_close(weights[kept], right[kept])


def aged(name: str, spans: list[tuple[int, int, int]], length: int = 10, mask: tuple[int, ...] = ()) -> TrainingSample:
    """A row of 3 prompt tokens; `spans` are (version, start, end), `mask` positions that are not trained."""
    plain = row(name, length - 3, 1.0)
    loss_mask = plain.loss_mask.copy()
    loss_mask[list(mask)] = 0
    return dataclasses.replace(plain, spans=tuple(VersionSpan(*span) for span in spans), loss_mask=loss_mask)


def test_ages_are_told_by_token_and_by_rollout() -> None:
    rows = [
        aged("a", [(5, 3, 7), (7, 7, 10)]),  # 4 tokens of age 2, 3 of age 0
        aged("b", [(7, 3, 10)]),  # 7 of age 0
        aged("c", [(3, 3, 5), (6, 5, 10)], mask=(3, 4)),  # the old ones are masked: 5 of age 1
        aged("d", [(6, 3, 10)], mask=(3, 4, 5, 6, 7, 8, 9)),  # nothing is trained
        dataclasses.replace(aged("b", [(6, 3, 4)], length=4), branch=1),  # a second row of b: 1 of age 1
    ]
    assert age_metrics(rows, 7) == pytest.approx(
        {
            "staleness/mean": (8 + 6) / 20,
            "staleness/max": 2,
            "staleness/age_0/share": 10 / 20,
            "staleness/age_1/share": 6 / 20,
            "staleness/age_2/share": 4 / 20,
            "staleness/rollout/min": 1,
            "staleness/rollout/mean": (2 + 1 + 1) / 3,
            "staleness/rollout/max": 2,
            "staleness/rollout/mixed_share": 2 / 3,
        }
    )
    assert age_metrics([], 7) == {"staleness/mean": 0.0, "staleness/max": 0.0}


def test_weights_by_age() -> None:
    sample = aged("a", [(5, 3, 7), (7, 7, 10)])
    assert age_weights(sample, 7, 0.5).tolist() == [1, 1, 1, 0.25, 0.25, 0.25, 0.25, 1, 1, 1]
    assert age_weights(sample, 7, 1.0).tolist() == [1] * 10
    # versions of the future, after a restart with fewer steps, count as fresh
    assert age_weights(sample, 6, 0.5).tolist() == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 1, 1, 1]
    assert age_weights(sample, 5000, 0.5).min() > 0, "a weight of 0 would say masked"


def test_the_laps_of_a_run_add_up_to_its_time() -> None:
    now = 100.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = StepClock(lambda: now)
    work(5)
    clock.skip()
    with clock.part("claim"):
        work(2)
    with clock.part("claim"):
        work(1)
    with clock.part("train"):
        work(4)
    with clock.part("save"):
        work(1)
    work(2)
    first = clock.lap(500)
    assert first == {
        "time/claim_s": 3,
        "time/train_s": 4,
        "time/save_s": 1,
        "time/publish_s": 0,
        "time/step_s": 10,
        "bubble/trainer/share": 0.3,
        "train/trained_tokens_per_s/mean": 50,
    }
    with clock.part("eval_hold"):
        work(3)
    second = clock.lap(0)
    assert (second["time/eval_hold_s"], second["time/step_s"], second["time/claim_s"]) == (3, 3, 0)
    assert clock.lap(7)["train/trained_tokens_per_s/mean"] == 0, "no time has passed"
