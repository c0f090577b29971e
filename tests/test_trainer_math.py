"""Advantages, losses, weights, packing and schedules, against vectors worked out by hand and plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.types import RenderedRow, TokenSource, TrainingSample, VersionSpan
from palestra.trainer.advantages import group_advantages
from palestra.trainer.batches import BatchRow, micro_batches, plan_updates, supervised_rows
from palestra.trainer.losses import PolicyLoss, k3, nll_loss
from palestra.trainer.prefix import pack
from palestra.trainer.schedule import constant, cosine
from palestra.trainer.types import TrainerError


def row(
    rollout: str,
    trained: int,
    reward: float | None,
    *,
    group: str = "g",
    branch: int = 0,
    prompt: int = 3,
    ids: Sequence[int] | None = None,
) -> TrainingSample:
    """A row of `prompt` tokens and `trained` sampled ones."""
    n = prompt + trained
    mask = np.array([0] * prompt + [1] * trained, dtype=np.uint8)
    sources = np.where(mask == 1, TokenSource.SAMPLED, TokenSource.PROMPT).astype(np.uint8)
    return TrainingSample(
        rollout_id=rollout,
        attempt=0,
        group_id=group,
        task_id="t",
        branch=branch,
        token_ids=np.arange(n, dtype=np.int32) if ids is None else np.array(ids, dtype=np.int32),
        loss_mask=mask,
        sources=sources,
        logprobs=np.where(mask == 1, -1.0, np.nan).astype(np.float32),
        spans=(VersionSpan(0, prompt, n),),
        temperature=1.0,
        reward=reward,
        turn_rewards=(),
        stop_reason="terminated",
    )


def values(rows: Sequence[TrainingSample], *, std: bool = False) -> list[float | None]:
    return [a.value if a is not None else None for a in group_advantages(rows, std_normalise=std)]


def test_a_rollout_counts_once_however_many_rows_it_has() -> None:
    rows = [row("A", 5, 0.0), *(row("B", n, 1.0, branch=i) for i, n in enumerate((10, 20, 70)))]
    assert values(rows) == [-0.5, 0.5, 0.5, 0.5]


def test_groups_are_found_by_id() -> None:
    rows = [row("a", 2, 1.0, group="x"), row("c", 2, 5.0, group="y"), row("b", 2, 3.0, group="x")]
    assert values(rows) == [-1.0, 0.0, 1.0]


def test_who_takes_no_part_in_the_baseline() -> None:
    rows = [row("a", 2, 1.0), row("b", 2, 3.0), row("masked", 0, 100.0), row("unscored", 2, None)]
    assert values(rows) == [-1.0, 1.0, None, None]
    root = 1 / math.sqrt(2)
    assert values(rows, std=True) == [pytest.approx(-root), pytest.approx(root), None, None]


def test_equal_rewards_give_zero_also_when_normalised() -> None:
    assert values([row("a", 2, 0.1), row("b", 2, 0.1), row("c", 2, 0.1)], std=True) == [0.0, 0.0, 0.0]
    assert values([row("alone", 2, 7.0)], std=True) == [0.0]


def test_rows_of_a_rollout_must_agree() -> None:
    with pytest.raises(TrainerError, match="rollout A disagree"):
        values([row("A", 2, 0.0), row("A", 2, 1.0, branch=1)])


def test_weights_are_the_mean_over_rollouts_of_the_mean_over_tokens() -> None:
    rows = [row("A", 5, 0.0), *(row("B", n, 1.0, branch=i) for i, n in enumerate((10, 20, 70)))]
    plan = plan_updates(rows, group_advantages(rows, std_normalise=False), 1)
    (weighted,) = plan.updates
    sums = {i: float(each.weights.sum()) for i, each in enumerate(weighted)}
    assert sums == pytest.approx({0: 0.5, 1: 0.05, 2: 0.1, 3: 0.35})
    assert np.unique(weighted[0].weights[3:]).tolist() == [pytest.approx(0.1)]
    assert plan.rollouts == 2
    assert plan.rows_left_out == 0


def test_a_masked_row_divides_nothing() -> None:
    rows = [row("A", 4, 1.0), row("B", 0, 1.0), row("C", 2, None)]
    plan = plan_updates(rows, group_advantages(rows, std_normalise=False), 1)
    (weighted,) = plan.updates
    assert [each.weights.tolist() for each in weighted] == [[0, 0, 0, 0.25, 0.25, 0.25, 0.25]]
    assert plan.rows_left_out == 2


def test_position_zero_is_never_trained() -> None:
    rows = [row("A", 3, 1.0, prompt=0)]
    (weighted,) = plan_updates(rows, group_advantages(rows, std_normalise=False), 1).updates
    assert weighted[0].weights.tolist() == [0, 0.5, 0.5]


def test_updates_split_whole_rollouts() -> None:
    rows = [row(name, n, float(n), branch=b) for name in "abcde" for b, n in enumerate((2, 4))]
    rows = [row(r.rollout_id, int(r.loss_mask.sum()), float(ord(r.rollout_id)), branch=r.branch) for r in rows]
    plan = plan_updates(rows, group_advantages(rows, std_normalise=False), 2)
    ids = [[each.sample.rollout_id for each in part if each.sample] for part in plan.updates]
    assert ids == [["a", "a", "b", "b", "c", "c"], ["d", "d", "e", "e"]]
    for part in plan.updates:
        assert sum(float(each.weights.sum()) for each in part) == pytest.approx(1.0)
    many = plan_updates(rows, group_advantages(rows, std_normalise=False), 9)
    assert [len(part) for part in many.updates] == [2] * 5
    assert plan_updates([row("x", 0, 1.0)], [None], 3).updates == ()


def test_supervised_weights() -> None:
    rendered = [
        RenderedRow(np.arange(4, dtype=np.int32), np.array([0, 1, 1, 0], dtype=np.uint8)),
        RenderedRow(np.arange(3, dtype=np.int32), np.array([1, 0, 1], dtype=np.uint8)),
        RenderedRow(np.arange(3, dtype=np.int32), np.array([1, 0, 0], dtype=np.uint8)),
    ]
    third = pytest.approx(1 / 3)
    assert [each.weights.tolist() for each in supervised_rows(rendered)] == [[0, third, third, 0], [0, 0, third]]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def batch_row(ids: Sequence[int]) -> BatchRow:
    weights = np.linspace(0.5, 1, len(ids), dtype=np.float32)
    return BatchRow(np.array(ids, dtype=np.int64), weights, -weights, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.integers(1, 20))
def test_packing_keeps_every_row_and_its_own_past(rows: list[list[int]], budget: int) -> None:
    packings = micro_batches([batch_row(ids) for ids in rows], budget)
    packed_rows = []
    for packing in packings:
        packed = pack(packing.batch)
        assert len(packing.rows) == 1 or len(packed.token_ids) <= budget
        for path, length, ids in zip(packed.paths, packing.batch.lengths, packing.batch.token_ids, strict=True):
            assert packed.token_ids[path].tolist() == ids[:length].tolist()
            assert packed.positions[path].tolist() == list(range(length))
            for i, node in enumerate(path):
                seen = np.arange(node + 1) if packed.visible is None else np.flatnonzero(packed.visible[node])
                assert seen.tolist() == path[: i + 1].tolist()
            packed_rows.append(ids[:length].tolist())
        for i, held in enumerate(packing.rows):
            assert packing.batch.weights[i, : len(held.weights)].tolist() == held.weights.tolist()
    assert sorted(packed_rows) == sorted(rows)


def test_rows_with_one_beginning_share_it() -> None:
    prompt = list(range(50))
    rows = [batch_row([*prompt, 100 + i]) for i in range(8)]
    (packing,) = micro_batches(rows, 64)
    assert len(pack(packing.batch).token_ids) == 58
    assert pack(micro_batches(rows[:1], 64)[0].batch).visible is None


def policy_batch(seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 5)
    logprobs = -torch.rand(shape, generator=draw, dtype=torch.float64) * 3
    weights = torch.rand(shape, generator=draw, dtype=torch.float64)
    weights[:, 0] = weights[1, 3:] = 0
    return logprobs, {
        "weights": weights,
        "advantages": torch.randn(shape, generator=draw, dtype=torch.float64),
        "rollout_logprobs": logprobs + torch.randn(shape, generator=draw, dtype=torch.float64) * 0.4,
        "ref_logprobs": logprobs + torch.randn(shape, generator=draw, dtype=torch.float64) * 0.4,
    }


@pytest.mark.parametrize("loss", [PolicyLoss(0.2, 0.3), PolicyLoss(0.1, 0.2, kl_coef=0.5), nll_loss])
def test_gradients_by_finite_difference(loss: PolicyLoss) -> None:
    logprobs, batch = policy_batch()
    assert torch.autograd.gradcheck(lambda x: loss(x, batch)[0], logprobs.requires_grad_())


def test_policy_loss_token_by_token() -> None:
    logprobs, batch = policy_batch(1)
    low, high, coef = 0.2, 0.3, 0.7
    expected, clipped, kl = 0.0, 0, 0.0
    for index in np.ndindex(*logprobs.shape):
        w, a = float(batch["weights"][index]), float(batch["advantages"][index])
        if w == 0:
            continue
        ratio = math.exp(float(logprobs[index]) - float(batch["rollout_logprobs"][index]))
        bounded = min(max(ratio, 1 - low), 1 + high)
        clipped += bounded * a < ratio * a
        r = float(batch["ref_logprobs"][index]) - float(logprobs[index])
        kl += math.exp(r) - 1 - r
        expected += w * (-min(ratio * a, bounded * a) + coef * (math.exp(r) - 1 - r))
    loss, sums = PolicyLoss(low, high, coef)(logprobs, batch)
    assert float(loss) == pytest.approx(expected)
    assert int(sums["clipped"]) == clipped > 0
    assert float(sums["kl_ref"]) == pytest.approx(kl)
    on = batch["weights"] != 0
    assert int(sums["tokens"]) == int(on.sum())
    gap = (logprobs - batch["rollout_logprobs"]).abs()[on]
    assert float(sums["max_abs_dlogp"]) == pytest.approx(float(gap.max()))
    assert float(sums["abs_dlogp"]) == pytest.approx(float(gap.sum()))
    assert float(sums["max_ratio"]) == pytest.approx(float((logprobs - batch["rollout_logprobs"])[on].exp().max()))


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    logprobs, batch = policy_batch(2)
    batch["rollout_logprobs"] = logprobs.clone()
    logprobs.requires_grad_()
    loss, sums = PolicyLoss()(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -batch["weights"] * batch["advantages"])
    assert float(sums["ratio"]) == float(sums["tokens"])
    assert float(sums["kl_rollout"]) == float(sums["clipped"]) == float(sums["max_abs_dlogp"]) == 0


def test_nothing_behind_the_mask_reaches_loss_or_gradient() -> None:
    logprobs, batch = policy_batch(3)
    off = batch["weights"] == 0
    for name in ("rollout_logprobs", "ref_logprobs"):
        batch[name] = torch.where(off, -1e4, batch[name])
    logprobs.requires_grad_()
    loss, sums = PolicyLoss(kl_coef=0.1)(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.isfinite(gradient).all()
    assert (gradient[off] == 0).all()
    assert all(torch.isfinite(value.double()) for value in sums.values())


def test_k3_is_zero_only_where_both_agree() -> None:
    a = torch.tensor([-1.0, -1.0, -1.0])
    b = torch.tensor([-1.0, -0.5, -1.5])
    assert k3(a, b)[0] == 0
    assert (k3(a, b)[1:] > 0).all()


def test_rates() -> None:
    assert [constant(s, 2.0, 4) for s in (1, 2, 4, 5, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert constant(1, 2.0, 0) == 2.0
    assert cosine(1, 1.0, 2, 10) == 0.5
    assert cosine(2, 1.0, 2, 10) == 1.0
    assert cosine(6, 1.0, 2, 10) == pytest.approx(0.55)
    assert cosine(10, 1.0, 2, 10) == pytest.approx(0.1)
