"""Rules of models and layouts: their arithmetic against brute force, and what they suggest against all other rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import changed, data_of
from palestra.cli.planner.fitting import Trial, tried
from palestra.cli.planner.plan import case_of, judge
from palestra.cli.planner.rules import registry
from palestra.cli.planner.types import Example, Finding, Severity
from palestra.envs.findings import Hit
from palestra.trainer.layout import rules, shapes
from palestra.trainer.layout.numbers import around, divisors, mesh_step, nearest, older, row_multiple, spreads
from palestra.trainer.layout.types import Layout, ModelDims, stage_layers

DENSE = ModelDims(layers=24, hidden=64, heads=12, kv_heads=4, head_dim=16, vocab=512, ffn=128)
MOE = replace(DENSE, experts=12, topk=2, moe_ffn=32)
SIZES = (1, 2, 3, 4, 6, 8)


def holds(hits: Iterator[Hit]) -> bool:
    return bool(list(hits))


def test_divisors_and_neighbours_are_those_that_counting_finds() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(each for each in range(1, number + 1) if not number % each)
    for number, step in product(range(40), range(1, 12)):
        if number % step:
            above, *below = around(number, step)
            assert above == min(each for each in range(number, number + step + 1) if not each % step)
            assert below == [max(each for each in range(number) if not each % step)] * (number > step)
    assert nearest((1, 2, 4, 8), 3) == (4, 2, 1, 8)


def test_a_mesh_holds_where_ranks_form_whole_copies() -> None:
    for gpus, tp, pp, cp in product(range(25), SIZES, SIZES, (1, 2)):
        layout = Layout(gpus, tp=tp, pp=pp, cp=cp)
        copies, left = 0, gpus
        while left >= tp * pp * cp:
            copies, left = copies + 1, left - tp * pp * cp
        assert holds(rules.dense_mesh(DENSE, layout)) == (left > 0 or not copies)
        if copies and not left:
            assert layout.dp == copies
    for gpus, pp, ep, etp in product((1, 6, 8, 12, 16, 48), (1, 2, 4), SIZES, (1, 2, 3)):
        layout = Layout(gpus, pp=pp, ep=ep, etp=etp)
        whole = gpus in range(etp * ep * pp, gpus + 1, etp * ep * pp)
        assert holds(rules.expert_mesh(MOE, layout)) != whole


def test_counts_that_both_meshes_divide_are_multiples_of_one_step() -> None:
    for tp, pp, cp, ep, etp in product((1, 2, 4), (1, 3), (1, 2), (1, 4, 8), (1, 2)):
        step = mesh_step(Layout(1, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp))
        for gpus in range(1, 97):
            layout = Layout(gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
            fits = not holds(rules.dense_mesh(MOE, layout)) and not holds(rules.expert_mesh(MOE, layout))
            assert fits == (gpus % step == 0)


def test_experts_and_heads_are_shared_out_whole() -> None:
    for size in range(1, 25):
        layout = Layout(size, tp=size, ep=size)
        assert holds(rules.expert_split(MOE, layout)) == (size not in (1, 2, 3, 4, 6, 12))
        assert holds(rules.expert_split(DENSE, layout)) == (size > 1)
        assert holds(rules.query_heads(DENSE, layout)) == (size not in (1, 2, 3, 4, 6, 12))
        # A rank has whole key heads, or whole groups of ranks share one.
        shared = any(each * size == DENSE.kv_heads or each * DENSE.kv_heads == size for each in range(1, 25))
        assert holds(rules.key_heads(DENSE, layout)) != shared
        assert not holds(rules.key_heads(replace(DENSE, kv_lora=8), layout))
        assert holds(rules.replicated_keys(DENSE, layout)) == (size > DENSE.kv_heads)


def every_spread(layers: int, pp: int) -> set[tuple[int, ...]]:
    """Stages of at least one layer whose middle ones are equal."""
    found = set()
    for first, last, middle in product(range(1, layers + 1), range(1, layers + 1), range(1, layers + 1)):
        stages = (first, *[middle] * (pp - 2), last)
        if sum(stages) == layers:
            found.add(stages)
    return found


def test_ends_of_a_pipeline_that_are_suggested_are_the_evenest_there_are() -> None:
    for layers, pp, vpp in product(range(1, 17), range(2, 6), (1, 2, 3)):
        possible = {each for each in every_spread(layers, pp) if not any(size % vpp for size in each)}
        pairs = spreads(layers, pp, vpp)
        stages = [stage_layers(layers, pp, first, last) for first, last in pairs]
        assert all(each in possible for each in stages)
        assert bool(pairs) == bool(possible)
        if stages and stages[0]:
            assert max(stages[0]) == min(max(each) for each in possible)


def test_stages_hold_every_layer_once() -> None:
    assert stage_layers(94, 4, None, 22) == (24, 24, 24, 22)
    assert stage_layers(24, 2, 14, 10) == (14, 10)
    assert stage_layers(24, 2, 14, 14) is None
    for layers, pp, first, last in product(range(1, 12), range(1, 5), (None, 1, 3), (None, 1, 2)):
        stages = stage_layers(layers, pp, first, last)
        assert stages is None or (sum(stages) == layers and len(stages) == pp and min(stages) > 0)
    assert spreads(94, 4)[0] == (None, 22)
    assert spreads(94, 4, 5) == ()


def test_micro_batches_fill_the_interleaved_schedule_as_megatron_counts_them() -> None:
    for pp, count in product((2, 3, 4), range(1, 20)):
        group = pp
        refused = group > count or 0 < count % group < pp
        assert holds(rules.chunk_microbatches(Layout(pp, pp=pp, vpp=2), count)) == refused
        assert not holds(rules.chunk_microbatches(Layout(pp, pp=pp), count))


def test_a_row_is_padded_to_the_least_length_that_all_ranks_share() -> None:
    for tp, cp in product((1, 2, 4, 8), (1, 2, 3, 4)):
        multiple = row_multiple(Layout(tp * cp, tp=tp, cp=cp, sp=tp > 1))
        parts = (tp, 2 * cp if cp > 1 else 1)
        assert multiple == next(each for each in range(1, 100) if not any(each % part for part in parts))


@pytest.mark.parametrize(
    ("text", "old"),
    [
        ("0.16.1", True),
        ("0.20", False),
        ("0.20.0", False),
        ("core_v0.19.2", True),
        ("1.0", False),
        ("0.9", True),
        ("main", True),
    ],
)
def test_versions_are_compared_by_their_numbers(text: str, old: bool) -> None:
    assert older(text, "0.20") is old


def test_what_a_version_gets_wrong_is_found_for_that_version_alone() -> None:
    alone, spread = Layout(8, tp=2), Layout(8, tp=2, ep=4)
    assert holds(rules.expert_gradients(MOE, alone, "0.16.1"))
    assert not holds(rules.expert_gradients(MOE, alone, "0.20.1"))
    assert not holds(rules.expert_gradients(MOE, replace(alone, etp=2), "0.16.1"))
    assert holds(rules.expert_norm(MOE, spread, "0.16.1", True))
    assert not holds(rules.expert_norm(MOE, spread, "0.16.1", False))
    assert holds(rules.auxiliary_losses(MOE, spread, "0.16.1", (0.0, 0.1), True))
    assert not holds(rules.auxiliary_losses(MOE, Layout(8, ep=4), "0.16.1", (0.1, 0.1), True))
    linear = replace(DENSE, linear_layers=12, lin_k_heads=4, lin_v_heads=8)
    assert holds(rules.linear_heads(linear, Layout(2, cp=2), "0.16.1"))
    assert not holds(rules.linear_heads(linear, Layout(4, tp=2, cp=2), "0.20"))
    assert holds(rules.linear_heads(linear, Layout(8, tp=4, cp=2), "0.20"))


def test_rules_of_shapes_take_any_number() -> None:
    checks = (
        shapes.grouped_heads,
        shapes.routed_experts,
        shapes.expert_width,
        shapes.layer_counts,
        shapes.shared_linear_heads,
    )
    for small in (0, 1, 5):
        model = replace(MOE, topk=small, moe_ffn=small, dense_layers=30 * small, linear_layers=small, lin_k_heads=0)
        assert model.moe_layers >= 0
        for check in checks:
            list(check(model))


BROKEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("P201", "qwen3-30b", {"placement.train_gpus": 6}),
    ("P203", "qwen3-30b", {"train.ep": 3}),
    ("P204", "qwen3-4b", {"train.tp": 3}),
    ("P207", "qwen3-235b", {"train.last_stage_layers": None}),
    ("P212", "qwen3-30b", {"train.ep": 1}),
    ("P214", "qwen3-30b", {"train.aux_loss_coef": 0.01}),
    ("P401", "qwen3-30b", {"rollout.gpus_per_engine": 3}),
    ("P406", "qwen3-30b", {"rollout.weight_dtype": "fp8"}),
    ("P701", "deepseek-v3", {"algo.updates_per_batch": 3}),
    ("P707", "deepseek-v3", {"train.max_tokens_per_gpu": 8192}),
    ("P801", "qwen3-30b", {"train.optimizer_offload": 0.0}),
    (
        "P803",
        "qwen3-235b",
        {"rollout.gpus_per_engine": 4, "rollout.dp": 1, "rollout.dp_attention": False, "rollout.ep": 4},
    ),
)


def of(recipe: str, changes: dict[str, Any]) -> Case:
    case, *_ = case_of(changed(data_of(Example(recipe)), changes))
    assert case is not None
    return case


def judged(case: Case) -> dict[tuple[str, str], Finding]:
    """What rules say, by code and path; they do not look for what mends it."""
    return {(each.code, each.path): each for each in judge(Trial(case.input, case.model))}


@pytest.mark.parametrize(("code", "recipe", "changes"), BROKEN)
def test_a_broken_copy_of_a_public_recipe_is_told_apart(code: str, recipe: str, changes: dict[str, Any]) -> None:
    assert code in {each.code for each in judged(of(recipe, changes)).values() if each.severity is Severity.ERROR}
    assert not [each for each in judged(of(recipe, {})).values() if each.severity is Severity.ERROR]


FIELDS: dict[str, tuple[Any, ...]] = {
    "train.tp": (1, 2, 3, 4, 6, 8),
    "train.pp": (1, 2, 3, 4, 5, 8),
    "train.vpp": (1, 2, 3),
    "train.cp": (1, 2, 4),
    "train.ep": (1, 2, 3, 8, 16, 64),
    "train.etp": (1, 2, 4),
    "train.sp": (True, False),
    "train.first_stage_layers": (1, 12, 100),
    "train.last_stage_layers": (9, 22),
    "train.mcore_version": ("0.16.1", "0.20.0"),
    "placement.train_gpus": (0, 1, 6, 8, 24, 64, 100),
    "hardware.nodes": (1, 4, 16),
}


@pytest.mark.parametrize("seed", range(3))
def test_what_rules_of_layouts_suggest_mends_them_and_breaks_nothing(seed: int) -> None:
    rng, mended = random.Random(seed), 0
    recipes = ("qwen3-4b", "qwen3-30b", "qwen3-235b", "qwen3-next", "two-nodes", "laptop")
    for _ in range(8):
        chosen = {field: rng.choice(FIELDS[field]) for field in rng.sample(sorted(FIELDS), rng.choice((1, 2, 4)))}
        case = of(rng.choice(recipes), chosen)
        before = judged(case)
        for code, path in [key for key in before if key[0].startswith("P2")]:
            found = next(each for each in registry()[code].findings(case) if each.path == path)
            if found.suggest:
                mended += 1
                after = judged(tried(case, found.suggest))
                assert (code, path) not in after, (chosen, found)
                new = {key for key, each in after.items() if each.severity is Severity.ERROR} - before.keys()
                assert not new, (chosen, found, new)
    assert mended > 3
