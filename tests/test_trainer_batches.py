"""Reductions, the splitting of a batch, balancing and micro-batches of several ranks: by hand, by brute force and by property."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.types import TrainingSample
from palestra.trainer.advantages import batch_advantages
from palestra.trainer.balancing import balance, distribute, filler
from palestra.trainer.batches import BatchRow, micro_batches, padded, plan_updates
from palestra.trainer.config import AlgoConfig
from palestra.trainer.losses import PolicyLoss
from palestra.trainer.prefix import pack
from palestra.trainer.reductions import WEIGHS, Kind, Reduction, Share, reduction_of
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.step import train_batch
from palestra.trainer.types import F32, ForwardStats, Loss, MicroBatch, OptimStats, RowAdvantage, TrainerError
from tests.conformance.backend_suite import micro_batch
from tests.tiny import make_tiny_moe
from tests.trainrows import group_of, row

KINDS: tuple[Kind, ...] = get_args(Kind)


def advantages(rows: Sequence[TrainingSample]) -> list[RowAdvantage | None]:
    return batch_advantages(rows, AlgoConfig()).rows


# Reductions.

SHARES = [Share("g", 4), Share("g", 8), Share("h", 4)]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction("rollout_mean"), [1 / 12, 1 / 24, 1 / 12]),
        (Reduction("token_mean"), [1 / 16, 1 / 16, 1 / 16]),
        (Reduction("prompt_mean"), [1 / 24, 1 / 24, 1 / 8]),
        (Reduction("constant", 10), [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_by_hand(reduction: Reduction, expected: list[float]) -> None:
    assert reduction(SHARES) == pytest.approx(expected)
    assert reduction([]) == []


def test_every_reduction_has_its_weights_and_its_fields() -> None:
    assert tuple(WEIGHS) == KINDS
    assert reduction_of(AlgoConfig()) == Reduction("rollout_mean", 1)
    given_ = AlgoConfig.model_validate({"reduction": "constant", "reduction_tokens": 7})
    assert reduction_of(given_) == Reduction("constant", 7)
    with pytest.raises(TrainerError, match="without a trained token"):
        Reduction()([Share("g", 0)])


def reduced(losses: Mapping[str, tuple[str, list[list[float]]]], kind: Kind, constant: int) -> float:
    """The loss of a step from its definition: rollout -> (group, token losses of each row)."""
    flat = {name: (group, [x for part in parts for x in part]) for name, (group, parts) in losses.items()}
    if kind == "token_mean":
        return float(np.mean([x for _, each in flat.values() for x in each]))
    if kind == "prompt_mean":
        groups = {group for group, _ in flat.values()}
        return float(np.mean([np.mean([x for own, each in flat.values() if own == g for x in each]) for g in groups]))
    if kind == "constant":
        return float(np.mean([np.sum(each) / constant for _, each in flat.values()]))
    return float(np.mean([np.mean(each) for _, each in flat.values()]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("gh"), st.lists(st.integers(1, 4), min_size=1, max_size=3)), min_size=1, max_size=5
    ),
    st.sampled_from(KINDS),
)
def test_the_weighted_sum_is_the_loss_as_defined(told: list[tuple[str, list[int]]], kind: Kind) -> None:
    rows, losses = [], dict[str, tuple[str, list[list[float]]]]()
    for i, (group, parts) in enumerate(told):
        rows += [row(f"r{i}", "pp" + "S" * n, float(i), group=group, branch=b) for b, n in enumerate(parts)]
        losses[f"r{i}"] = (group, [[100.0 * i + 10 * b + t for t in range(n)] for b, n in enumerate(parts)])
    (step,) = plan_updates(rows, advantages(rows), 1, Reduction(kind, 9)).updates
    total = 0.0
    for each in step:
        assert each.sample is not None
        own = losses[each.sample.rollout_id][1][each.sample.branch]
        total += float(np.dot(each.weights[2:].astype(np.float64), own))
    assert total == pytest.approx(reduced(losses, kind, 9), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_row_divides_nothing(kind: Kind) -> None:
    """Four valid tokens beside a row that is masked through and through: divided by 4."""
    rows = [row("a", "ppSSSS", 1.0), row("b", "ppxxxx", 1.0), row("a", "psSxx", 1.0, branch=1)]
    plan = plan_updates(rows[:2], advantages(rows[:2]), 1, Reduction(kind, 4))
    assert [each.weights.tolist() for each in plan.updates[0]] == [[0, 0, 0.25, 0.25, 0.25, 0.25]]
    assert (plan.rollouts, plan.rows_left_out) == (1, 1)
    forked = plan_updates(rows, advantages(rows), 1, Reduction(kind, 5))
    assert [each.weights.sum() for each in forked.updates[0]] == pytest.approx([0.8, 0.2])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ghi"), st.lists(st.integers(0, 3), min_size=1, max_size=3)), min_size=1, max_size=9
    ),
    st.integers(1, 5),
    st.sampled_from(KINDS),
)
def test_rows_of_a_rollout_share_their_optimizer_step(
    told: list[tuple[str, list[int]]], updates: int, kind: Kind
) -> None:
    rows = [
        row(f"r{i}", "pp" + "S" * n, float(i), group=group, branch=b)
        for i, (group, parts) in enumerate(told)
        for b, n in enumerate(parts)
    ]
    plan = plan_updates(rows, advantages(rows), updates, Reduction(kind, 3))
    names = [{each.sample.rollout_id for each in step if each.sample} for step in plan.updates]
    assert sum(map(len, names)) == len(set().union(*names)) == plan.rollouts
    assert len(plan.updates) == min(updates, plan.rollouts)
    assert max(map(len, names), default=0) - min(map(len, names), default=0) <= 1
    kept = Counter(
        (each.sample.rollout_id, each.sample.branch) for step in plan.updates for each in step if each.sample
    )
    assert kept == Counter((each.rollout_id, each.branch) for each in rows if each.loss_mask.any())
    assert plan.rows_left_out == len(rows) - kept.total()
    for step in plan.updates:
        if kind != "constant":
            assert sum(float(each.weights.sum()) for each in step) == pytest.approx(1.0)


def test_tokens_of_a_row_have_their_turns_advantages() -> None:
    rows = [row("a", "pSoS", 1.0), row("b", "ppSS", 0.0)]
    told = [
        RowAdvantage("a", 0, 0.5, 0.0, 0.0, np.array([0, 2, 0, -1], dtype=np.float32)),
        RowAdvantage("b", 0, 3.0, 0, 0),
    ]
    (step,) = plan_updates(rows, told, 1).updates
    assert padded(step).batch.advantages.tolist() == [[0, 2, 0, -1], [3, 3, 3, 3]]


class Watched:
    """A backend without a model: log p of every token is the engine's. It keeps what it was asked to learn."""

    def __init__(self) -> None:
        self.batches: list[MicroBatch] = []

    def forward_backward(self, batches: Sequence[MicroBatch], loss: Loss) -> ForwardStats:
        self.batches += batches
        sums: Counter[str] = Counter()
        total = 0.0
        for batch in batches:
            arrays = {
                name: torch.from_numpy(getattr(batch, name)) for name in ("weights", "advantages", "rollout_logprobs")
            }
            value, more = loss(arrays["rollout_logprobs"].clone().requires_grad_(), arrays)
            total += float(value.detach())
            sums.update({name: float(each) for name, each in more.items()})
        return ForwardStats(total, dict(sums), sum(batch.token_ids.size for batch in batches))

    def optim_step(self, lr: float) -> OptimStats:
        return OptimStats(1.0, lr)

    def logprobs(self, batches: Sequence[MicroBatch], *, reference: bool = False) -> list[F32]:
        return [batch.rollout_logprobs for batch in batches]


def test_a_step_learns_by_the_run_s_estimator_turns_and_reduction() -> None:
    algo = {"estimator": "rloo", "turn_discount": 0.5, "reduction": "token_mean"}
    rows = [
        row("a", "pSoSS", 1.0, turns=(0.0, 0.0), ids=[1, 2, 3, 4, 5]),
        row("b", "pS", 0.5, turns=(0.0,), ids=[1, 9]),
    ]
    backend = Watched()
    settings_ = TrainerSettings(Path("m"), 1, AlgoConfig.model_validate(algo))
    done = train_batch(backend, [group_of(rows)], settings_, policy_version=0, optimizer_steps=0)  # type: ignore[arg-type]
    (batch,) = backend.batches
    assert batch.weights.tolist() == [[0, 0.25, 0, 0.25, 0.25], [0, 0.25, 0, 0, 0]]
    # what followed: a 0.5, 1; b 0.5, and 0.5 where a has its second turn
    assert batch.advantages.tolist() == [[0, 0, 0, 0.5, 0.5], [0, 0, 0, 0, 0]]
    assert done.metrics["train/turn_credit/untold"] == 0
    assert done.metrics["train/loss"] == pytest.approx(-0.25)


# Balancing.


def best(sizes: Sequence[int], ranks: int) -> int:
    """The smallest largest sum, by trying all."""
    return min(
        max(sum(size for size, at in zip(sizes, choice, strict=True) if at == rank) for rank in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(sizes))
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4))
def test_balance_against_brute_force(sizes: list[int], ranks: int) -> None:
    parts = balance(sizes, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(sizes[at] for at in part) for part in parts]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] <= (4 / 3 - 1 / (3 * ranks)) * best(sizes, ranks) + 1e-9
    assert sums[0] - sums[-1] <= max(sizes, default=0)
    assert balance(sizes, ranks) == parts


def test_balance_by_hand() -> None:
    """Differences of 8 7 6 5 4 for two: 8-7=1, 6-5=1; 4 1 1; 4-1=3; 3-1=2. For three the sums are 11, 11 and 8."""
    for ranks, expected in ((2, [16, 14]), (3, [11, 11, 8]), (5, [8, 7, 6, 5, 4])):
        parts = balance([8, 7, 6, 5, 4], ranks)
        assert [sum((8, 7, 6, 5, 4)[at] for at in part) for part in parts] == expected
    assert balance([3, 1], 1) == [[0, 1]]
    assert balance([5, 5], 3) == [[0], [1], []]
    assert balance([], 2) == [[], []]


def test_many_sizes_are_nearly_even() -> None:
    sizes = np.random.default_rng(0).lognormal(6, 1, 400).astype(int).tolist()
    sums = [sum(sizes[at] for at in part) for part in balance(sizes, 8)]
    assert sums[0] - sums[-1] <= 2


@pytest.mark.parametrize(("sizes", "ranks"), [([1], 0), ([1, -1], 2)])
def test_what_cannot_be_balanced_is_refused(sizes: list[int], ranks: int) -> None:
    with pytest.raises(TrainerError, match="cannot spread"):
        balance(sizes, ranks)


def batch_row(ids: Sequence[int]) -> BatchRow:
    weights = np.linspace(0.5, 1, len(ids), dtype=np.float32)
    return BatchRow(np.array(ids, dtype=np.int64), weights, -weights, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=9), st.integers(1, 4), st.integers(1, 24))
def test_each_row_goes_to_one_rank_and_all_ranks_have_as_many_micro_batches(
    told: list[list[int]], ranks: int, budget: int
) -> None:
    rows = [batch_row(ids) for ids in told]
    shares = distribute(rows, ranks, budget)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    placed = Counter(id(each) for share in shares for packing in share for each in packing.rows)
    assert placed == Counter(map(id, rows))
    loads = []
    for share in shares:
        real = [packing for packing in share if packing.rows]
        assert all(packing.rows for packing in share[: len(real)])
        for packing in share:
            assert len(packing.rows) <= 1 or len(pack(packing.batch).token_ids) <= budget
            assert packing.rows or not packing.batch.weights.any()
        loads.append(sum(len(pack(packing.batch).token_ids) for packing in real))
    if rows:
        plain = [len(pack(packing.batch).token_ids) for packing in micro_batches(rows, budget)]
        assert max(loads) <= sum(plain[at] for at in balance(plain, ranks)[0])
        assert any(packing.rows for share in shares for packing in share[-1:])


def test_one_rank_has_the_plain_micro_batches() -> None:
    rows = [batch_row(np.random.default_rng(i).integers(0, 9, 12).tolist()) for i in range(7)]
    (alone,) = distribute(rows, 1, 30)
    assert [[id(each) for each in packing.rows] for packing in alone] == [
        [id(each) for each in packing.rows] for packing in micro_batches(rows, 30)
    ]


def test_few_rows_are_spread_over_all_ranks_where_one_micro_batch_would_hold_them() -> None:
    rows = [batch_row([i] * 10) for i in range(8)]
    shares = distribute(rows, 4, 1000)
    assert [[len(packing.rows) for packing in share] for share in shares] == [[2], [2], [2], [2]]
    shares = distribute(rows[:3], 4, 1000)
    assert sorted(len(packing.rows) for share in shares for packing in share) == [0, 1, 1, 1]


def test_a_row_that_outweighs_all_others_is_alone_on_its_rank() -> None:
    rows = [batch_row([9] * 100), *(batch_row([i] * 10) for i in range(6))]
    shares = distribute(rows, 2, 40)
    assert sorted(sum(len(packing.rows) for packing in share) for share in shares) == [1, 6]
    assert len(shares[0]) == len(shares[1]) == 2


def test_without_rows_nobody_has_a_micro_batch() -> None:
    assert distribute([], 3, 10) == [[], [], []]


@pytest.mark.walk
def test_a_filler_goes_through_a_model_and_teaches_nothing(tmp_path: Path) -> None:
    from palestra.trainer.megatron.backend import MegatronBackend

    folder = make_tiny_moe(tmp_path / "model")
    real = micro_batch([[5, 6, 7, 8], [5, 6, 9]], [2, 1], 1.0)
    told = []
    for batches in ([real], [real, filler().batch]):
        backend = MegatronBackend.from_folder(folder)
        stats = backend.forward_backward(batches, PolicyLoss())
        told.append((stats.loss, backend.optim_step(1e-3).grad_norm, dict(backend.export())))
    (loss, norm, weights), (with_loss, with_norm, with_weights) = told
    assert (with_loss, with_norm) == pytest.approx((loss, norm), rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(with_weights[name], tensor, rtol=0, atol=1e-6)
    (only,) = MegatronBackend.from_folder(folder).logprobs([filler().batch])
    assert only.tolist() == [[0.0]]
