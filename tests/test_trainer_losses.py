"""Policy losses, KL estimates, what is left out of them, and losses of the user's: against loops over single tokens, and autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from palestra.trainer.config import LOSSES, AlgoConfig
from palestra.trainer.correction import RatioCorrection
from palestra.trainer.losses import ESTIMATES, SURROGATES, Clip, PolicyLoss, k1, k2, k3
from palestra.trainer.losses.own import load_loss
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import loss_of
from palestra.trainer.types import TrainerError
from tests.test_trainer_math import policy_batch

LOW, HIGH = 0.15, 0.25


def by_rows(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A batch whose rows have one advantage and one weight each, the second row's positive; rows 0 and 2 moved far, down and up."""
    logprobs, batch = policy_batch(seed)
    on = batch["weights"] != 0
    batch["advantages"] = torch.tensor([[-0.7], [1.3], [0.9]], dtype=torch.float64).expand(3, 5).clone()
    batch["weights"] = torch.where(on, torch.tensor([[0.1], [0.2], [0.05]], dtype=torch.float64), 0.0)
    shift = torch.tensor([[0.5], [0.02], [-0.4]], dtype=torch.float64)
    batch["rollout_logprobs"] = logprobs + shift + 0.1 * (batch["rollout_logprobs"] - logprobs)
    return logprobs, batch


def tokens_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Trained positions of each row."""
    return [[int(c) for c in np.flatnonzero(row)] for row in batch["weights"].numpy()]


def ratio_at(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int, c: int) -> float:
    return math.exp(float(logprobs[r, c]) - float(batch["rollout_logprobs"][r, c]))


def row_ratio(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int) -> float:
    """The geometric mean, as a root of a product."""
    columns = tokens_of(batch)[r]
    return math.prod(ratio_at(logprobs, batch, r, c) for c in columns) ** (1 / len(columns))


def clip(ratio: float) -> float:
    return min(max(ratio, 1 - LOW), 1 + HIGH)


Term = Callable[[torch.Tensor, dict[str, torch.Tensor], int, int], float]


def total(term: Term, logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """Minus the weighted sum of `term` over trained tokens."""
    return -sum(
        float(batch["weights"][r, c]) * term(logprobs, batch, r, c)
        for r, columns in enumerate(tokens_of(batch))
        for c in columns
    )


def ppo_term(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int, c: int) -> float:
    a, ratio = float(batch["advantages"][r, c]), ratio_at(logprobs, batch, r, c)
    return min(ratio * a, clip(ratio) * a)


def gspo_term(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int, c: int) -> float:
    a, ratio = float(batch["advantages"][r, c]), row_ratio(logprobs, batch, r)
    return min(ratio * a, clip(ratio) * a)


def cispo_term(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int, c: int) -> float:
    return clip(ratio_at(logprobs, batch, r, c)) * float(batch["advantages"][r, c]) * float(logprobs[r, c])


def reinforce_term(logprobs: torch.Tensor, batch: dict[str, torch.Tensor], r: int, c: int) -> float:
    return float(batch["advantages"][r, c]) * float(logprobs[r, c])


TERMS: dict[str, Term] = {
    "ppo": ppo_term,
    "gspo": gspo_term,
    "gspo_token": gspo_term,
    "cispo": cispo_term,
    "reinforce": reinforce_term,
}


def gradient_of(loss: PolicyLoss, logprobs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    leaf = logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, batch)[0], leaf)
    return gradient


def test_every_loss_has_a_name_and_a_vector() -> None:
    assert set(SURROGATES) == set(LOSSES) == set(TERMS)


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("make", [policy_batch, by_rows])
def test_values_token_by_token(kind: str, make: Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
    for seed in range(4):
        logprobs, batch = make(seed)
        loss, sums = PolicyLoss(LOW, HIGH, kind=kind)(logprobs, batch)
        assert float(loss) == pytest.approx(total(TERMS[kind], logprobs, batch), rel=1e-9)
        assert int(sums["tokens"]) == sum(map(len, tokens_of(batch)))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_gradients_by_finite_difference(kind: str) -> None:
    for make in (policy_batch, by_rows):
        logprobs, batch = make(6)
        loss = PolicyLoss(LOW, HIGH, kind=kind, dual_clip=1.6 if kind == "ppo" else None)
        assert torch.autograd.gradcheck(lambda x, run=loss, b=batch: run(x, b)[0], logprobs.clone().requires_grad_())


def test_what_cispo_and_reinforce_follow() -> None:
    """Weights without gradient: by hand -w * clip(r) * A, and -w * A."""
    logprobs, batch = policy_batch(7)
    on = batch["weights"] != 0
    plain = -batch["weights"] * batch["advantages"]
    ratio = torch.where(on, logprobs - batch["rollout_logprobs"], 0.0).exp()
    torch.testing.assert_close(gradient_of(PolicyLoss(kind="reinforce"), logprobs, batch), plain)
    bounded = torch.from_numpy(np.clip(ratio.numpy(), 1 - LOW, 1 + HIGH))
    torch.testing.assert_close(gradient_of(PolicyLoss(LOW, HIGH, kind="cispo"), logprobs, batch), plain * bounded)
    _, sums = PolicyLoss(LOW, HIGH, kind="cispo")(logprobs, batch)
    assert int(sums["clipped"]) == int(((bounded != ratio) & on).sum()) > 0
    assert int(PolicyLoss(kind="reinforce")(logprobs, batch)[1]["clipped"]) == 0


def test_cispo_without_a_lower_bound_is_a_truncated_weight() -> None:
    logprobs, batch = policy_batch(7)
    found = gradient_of(PolicyLoss(1.0, 0.3, kind="cispo"), logprobs, batch)
    ratio = torch.where(batch["weights"] != 0, logprobs - batch["rollout_logprobs"], 0.0).exp()
    torch.testing.assert_close(found, -batch["weights"] * batch["advantages"] * ratio.clamp(max=1.3))


def test_gspo_by_token_is_gspo_where_a_row_has_one_advantage_and_one_weight() -> None:
    logprobs, batch = by_rows(8)
    rows, tokens = (gradient_of(PolicyLoss(LOW, HIGH, kind=kind), logprobs, batch) for kind in ("gspo", "gspo_token"))
    torch.testing.assert_close(rows, tokens)
    assert rows[1].abs().max() > 0
    logprobs, batch = policy_batch(8)
    on = batch["weights"] != 0
    wide = PolicyLoss(0.9, 9.0, kind="gspo_token")  # nothing is clipped
    ratio = torch.tensor([[row_ratio(logprobs, batch, r)] for r in range(3)], dtype=torch.float64)
    right = -torch.where(on, batch["weights"] * batch["advantages"] * ratio, 0.0)
    torch.testing.assert_close(gradient_of(wide, logprobs, batch), right)
    assert not torch.allclose(gradient_of(dataclasses.replace(wide, kind="gspo"), logprobs, batch), right)


def test_gspo_clips_whole_rows() -> None:
    """Row 0 fell to about e^-0.5 with a negative advantage, row 2 rose to e^0.4 with a positive one: both are past the bound."""
    logprobs, batch = by_rows(9)
    loss = PolicyLoss(LOW, HIGH, kind="gspo")
    gradient, (_, sums) = gradient_of(loss, logprobs, batch), loss(logprobs, batch)
    assert gradient[0].abs().max() == gradient[2].abs().max() == 0
    assert gradient[1].abs().max() > 0
    columns = tokens_of(batch)
    assert int(sums["clipped"]) == len(columns[0]) + len(columns[2])
    mean = sum(row_ratio(logprobs, batch, r) * len(columns[r]) for r in range(3))
    assert float(sums["ratio"]) == pytest.approx(mean)


def test_dual_clip_by_hand() -> None:
    """Ratio 4 with advantage -1: min(r A, clip(r) A) is -4, at least 2.5 * -1. With advantage 1, and where the ratio is small, nothing
    changes."""
    ratio = torch.tensor([[4.0, 4.0, 2.0, 0.1]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    on, old = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.float64)
    plain = SURROGATES["ppo"](ratio.log(), old, advantages, on, Clip(0.2, 0.2))
    dual = SURROGATES["ppo"](ratio.log(), old, advantages, on, Clip(0.2, 0.2, 2.5))
    assert plain.values.tolist() == [[pytest.approx(each) for each in (-4.0, 1.2, -2.0, -0.8)]]
    assert dual.values.tolist() == [[pytest.approx(each) for each in (-2.5, 1.2, -2.0, -0.8)]]
    assert plain.clipped.tolist() == [[False, True, False, True]]
    assert dual.clipped.tolist() == [[True, True, False, True]]
    leaf = ratio.log().requires_grad_()
    (gradient,) = torch.autograd.grad(
        SURROGATES["ppo"](leaf, old, advantages, on, Clip(0.2, 0.2, 2.5)).values.sum(), leaf
    )
    assert gradient.tolist() == [[0.0, 0.0, pytest.approx(-2.0), 0.0]]


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("correction", [None, RatioCorrection("tis"), RatioCorrection("seq_tis")])
def test_on_policy_every_loss_is_the_plain_policy_gradient(kind: str, correction: RatioCorrection | None) -> None:
    logprobs, batch = by_rows(2)
    batch["rollout_logprobs"] = logprobs.clone()
    loss = PolicyLoss(correction=correction, kind=kind)
    torch.testing.assert_close(gradient_of(loss, logprobs, batch), -batch["weights"] * batch["advantages"])


@pytest.mark.parametrize("kind", TERMS)
def test_nothing_behind_the_mask_reaches_loss_or_gradient(kind: str) -> None:
    logprobs, batch = policy_batch(3)
    batch["entropy"] = torch.ones_like(logprobs)
    loss = PolicyLoss(kl_coef=0.1, kind=kind, opsm_delta=0.01, entropy_coef=0.1)
    before, _ = loss(logprobs, batch)
    off = batch["weights"] == 0
    for name in ("rollout_logprobs", "ref_logprobs", "entropy", "advantages"):
        batch[name] = torch.where(off, -1e4, batch[name])
    after, sums = loss(torch.where(off, -50.0, logprobs), batch)
    assert float(after) == pytest.approx(float(before), rel=1e-12)
    gradient = gradient_of(loss, logprobs, batch)
    assert torch.isfinite(gradient).all()
    assert (gradient[off] == 0).all()
    assert all(torch.isfinite(value.double()) for value in sums.values())


def test_estimates_of_the_divergence() -> None:
    """Over a whole distribution k1 and k3 are the divergence itself; k2 is near it."""
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    divergence = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert float((p * k1(p.log(), q.log())).sum()) == pytest.approx(divergence)
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(divergence)
    assert (k3(p.log(), q.log()) >= 0).all()
    assert float((p * k2(p.log(), q.log())).sum()) == pytest.approx(
        sum(a * math.log(a / b) ** 2 / 2 for a, b in zip(p.tolist(), q.tolist(), strict=True))
    )


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_which_estimates_are_losses(name: str) -> None:
    """The mean gradient of samples, against that of the divergence: k2's is equal, k1's is 0 (so it is refused), k3's is another."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(-1)
    (right,) = torch.autograd.grad((log_p.exp() * (log_p - other)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((log_p.detach().exp() * ESTIMATES[name](log_p, other)).sum(), logits)
    if name == "k1":
        assert found.abs().max() < 1e-12
    elif name == "k2":
        torch.testing.assert_close(found, right)
    else:
        assert float(found @ right) > 0
        assert not torch.allclose(found, right)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_the_penalty_in_the_loss(name: str) -> None:
    logprobs, batch = policy_batch(4)
    plain, _ = PolicyLoss()(logprobs, batch)
    found, sums = PolicyLoss(kl_coef=0.3, kl_estimator=name)(logprobs, batch)
    weighted = told = 0.0
    for r, columns in enumerate(tokens_of(batch)):
        for c in columns:
            gap = float(batch["ref_logprobs"][r, c] - logprobs[r, c])
            each = gap**2 / 2 if name == "k2" else math.exp(gap) - 1 - gap
            weighted, told = weighted + float(batch["weights"][r, c]) * each, told + each
    assert float(found - plain) == pytest.approx(0.3 * weighted)
    assert float(sums["kl_ref"]) == pytest.approx(told)


def test_off_policy_rows_leave_the_surrogate_where_they_went_badly() -> None:
    """By mean log rollout - log p: row 0 (advantage -0.7) is 0.5 away, row 2 (0.9) the other way, row 1 hardly."""
    logprobs, batch = by_rows(5)
    loss = PolicyLoss(0.9, 9.0, opsm_delta=0.2)
    gradient, sums = gradient_of(loss, logprobs, batch), loss(logprobs, batch)[1]
    plain = gradient_of(PolicyLoss(0.9, 9.0), logprobs, batch)
    assert gradient[0].abs().max() == 0 < plain[0].abs().max()
    assert torch.equal(gradient[1:], plain[1:])
    assert int(sums["opsm_masked"]) == len(tokens_of(batch)[0])
    batch["advantages"] = -batch["advantages"]
    assert torch.equal(gradient_of(loss, logprobs, batch), gradient_of(PolicyLoss(0.9, 9.0), logprobs, batch))
    batch["advantages"][:] = -1.0
    assert int(PolicyLoss(opsm_delta=0.9)(logprobs, batch)[1]["opsm_masked"]) == 0, "within the bound"


def test_entropy_is_told_and_rewarded() -> None:
    logprobs, batch = policy_batch(1)
    with pytest.raises(TrainerError, match=r"algo\.entropy_coef needs a backend"):
        PolicyLoss(entropy_coef=0.1)(logprobs, batch)
    assert "entropy" not in PolicyLoss()(logprobs, batch)[1]
    plain, _ = PolicyLoss()(logprobs, batch)
    batch["entropy"] = torch.rand_like(logprobs).requires_grad_()
    loss, sums = PolicyLoss(entropy_coef=0.1)(logprobs, batch)
    on = batch["weights"] != 0
    assert float(sums["entropy"]) == pytest.approx(float(batch["entropy"].detach()[on].sum()))
    assert float(loss.detach()) == pytest.approx(
        float(plain - 0.1 * (batch["weights"] * batch["entropy"].detach()).sum())
    )
    (gradient,) = torch.autograd.grad(loss, batch["entropy"])
    torch.testing.assert_close(gradient, -0.1 * batch["weights"])


OWN = """
import torch

def plain(logprobs, batch):
    on = batch["weights"] != 0
    ratio = torch.where(on, logprobs - batch["old_logprobs"], 0.0).exp()
    sums = {"odd": (ratio.detach() > 1.1).sum(), "max_ratio": ratio.detach().max()}
    return -(batch["weights"] * ratio * batch["advantages"]).sum(), sums

class Made:
    def __call__(self, logprobs, batch):
        return plain(logprobs, batch)

class Needy:
    def __init__(self, x): ...

def raises(logprobs, batch): return batch["nope"]
def alone(logprobs, batch): return logprobs.sum()
def whole(logprobs, batch): return logprobs, {}
def dull(logprobs, batch): return torch.zeros(()), {}
def infinite(logprobs, batch): return (batch["weights"] * logprobs / 0).sum(), {}
def leaks(logprobs, batch): return logprobs.sum(), {}
def rough(logprobs, batch): return (batch["weights"] * (logprobs - logprobs.detach()).abs().sqrt()).sum(), {}
def listed(logprobs, batch): return (batch["weights"] * logprobs).sum(), []
def live(logprobs, batch): return (batch["weights"] * logprobs).sum(), {"x": logprobs.sum()}
three = 3
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", ["plain", "Made"])
def test_a_loss_of_the_user_s_stands_in_the_surrogate_s_place(own: Path, name: str) -> None:
    """Corrections and the penalty are made as for ours; its sums become metrics of its own."""
    algo = AlgoConfig.model_validate({"loss": f"{own}:{name}", "kl_coef": 0.2, "ratio_correction": "tis"})
    loss = loss_of(TrainerSettings(Path("m"), 1, algo))
    ours = PolicyLoss(0.999, 1e6, 0.2, RatioCorrection("tis"))
    logprobs, batch = policy_batch(3)
    batch["old_logprobs"] = logprobs + 0.05
    torch.testing.assert_close(loss(logprobs, batch)[0], ours(logprobs, batch)[0])
    torch.testing.assert_close(gradient_of(loss, logprobs, batch), gradient_of(ours, logprobs, batch))
    sums = loss(logprobs, batch)[1]
    assert {"own/odd", "max_own/ratio", "tokens", "correction", "kl_ref"} <= set(sums)
    assert "clipped" not in sums
    assert loss_of(TrainerSettings(Path("m"), 1, algo)).own is loss.own, "found once"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "has no 'nothing'"),
        ("three", "it is int, nothing that can be called"),
        ("Needy", "cannot be made without arguments"),
        ("raises", "a trial on two rows raised KeyError: 'nope'"),
        ("alone", "returned Tensor, no pair"),
        ("whole", "no finite tensor without dimensions"),
        ("infinite", "no finite tensor without dimensions"),
        ("dull", "has no gradient"),
        ("leaks", "reaches tokens of weight 0"),
        ("rough", "gradient is not finite"),
        ("listed", "its sums are list"),
        ("live", "its sum 'x' must be a tensor"),
    ],
)
def test_losses_that_are_none_are_told_before_anything_is_trained(own: Path, name: str, told: str) -> None:
    with pytest.raises(TrainerError, match=r"algo\.loss '") as caught:
        load_loss(f"{own}:{name}")
    assert told in str(caught.value)


def test_a_loss_is_tried_on_what_its_batches_will_have(tmp_path: Path) -> None:
    path = tmp_path / "beside.py"
    path.write_text(
        "def far(logprobs, batch):\n    return (batch['weights'] * (logprobs - batch['ref_logprobs'])).sum(), {}\n"
        "def wide(logprobs, batch):\n    return (batch['weights'] * (logprobs + batch['entropy'].detach())).sum(), {}\n"
    )

    def loss(name: str, **algo: object) -> PolicyLoss:
        section = AlgoConfig.model_validate({"loss": f"{path}:{name}", **algo})
        return loss_of(TrainerSettings(Path("m"), 1, section))

    with pytest.raises(TrainerError, match=r"beside\.py:far': a trial on two rows raised KeyError: 'ref_logprobs'"):
        loss("far")
    assert loss("far", kl_coef=0.1).own is not None
    assert loss("wide").own is not None, "megatron's backend tells the entropy unless told otherwise"


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(TrainerError, match="there is no module 'no_such_module_here'"):
        load_loss("no_such_module_here:loss")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"loss": "ppo2"}, "not built: algo.loss = 'ppo2'; use 'ppo' or 'gspo'"),
        ({"loss": "cispo", "dual_clip": 3.0}, "algo.dual_clip needs algo.loss = 'ppo'"),
        ({"dual_clip": 1.1}, "must be above 1 + algo.clip_high"),
        ({"loss": "reinforce", "clip_low": 0.1}, "algo.clip_low has no effect when algo.loss is 'reinforce'"),
        ({"loss": "a.b:c", "clip_high": 0.3}, "algo.clip_high has no effect"),
        ({"kl_in": "reward"}, "algo.kl_in = 'reward' has no effect without algo.kl_coef"),
        ({"kl_estimator": "k2"}, "algo.kl_estimator has no effect without algo.kl_coef"),
        ({"kl_estimator": "k1", "kl_coef": 0.1}, "use 'k2' or 'k3'"),
        ({"kl_estimator": "k3", "kl_coef": 0.1, "kl_in": "reward"}, "use 'k1'"),
        ({"ratio_correction": "none", "veto_floor": 0.1}, "algo.veto_floor has no effect"),
        ({"ratio_correction": "tis", "ratio_floor": 0.1}, "algo.ratio_floor needs"),
        ({"ratio_correction": "geo_mask", "ratio_clip": 3.0}, "algo.ratio_clip has no effect"),
        ({"opsm_delta": 0.0}, "greater than 0"),
        ({"clip_high": float("inf")}, "finite"),
        ({"kl_coef": 0.1, "kl_in": "reward", "turn_discount": 0.9}, "the last turn would pay for all of them"),
    ],
)
def test_settings_that_make_no_sense_are_refused(data: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgoConfig.model_validate(data)
    assert told in str(caught.value)


def test_what_the_sections_say_reaches_the_loss() -> None:
    def made(**algo: object) -> PolicyLoss:
        return loss_of(TrainerSettings(Path("m"), 1, AlgoConfig.model_validate(algo)))

    assert made() == PolicyLoss()
    assert made(dual_clip=3.0, clip_low=1.0, opsm_delta=0.1) == PolicyLoss(1.0, dual_clip=3.0, opsm_delta=0.1)
    gspo = made(loss="gspo")
    assert (gspo.kind, gspo.clip_low, gspo.clip_high) == ("gspo", 3e-4, 4e-4)
    assert gspo.correction == RatioCorrection("tis"), "its bounds are narrower than what engine and trainer differ by"
    assert made(loss="gspo", ratio_correction="none").correction is None
    assert made(loss="gspo_token", clip_low=0.01).clip_low == 0.01
    assert made(kl_coef=0.1, kl_estimator="k2") == PolicyLoss(kl_coef=0.1, kl_estimator="k2")
    assert made(kl_coef=0.1, kl_in="reward").kl_coef == 0
    assert made(veto_floor=1e-3).correction == RatioCorrection("tis", veto=1e-3)
    mis = made(ratio_correction="seq_mis", ratio_floor=0.2, ratio_clip=3.0).correction
    assert mis == RatioCorrection("seq_mis", 3.0, floor=0.2)
