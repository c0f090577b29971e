"""The numbers of whole plans: the worked example of two nodes, what replaces a guess, and advice on where to put what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from palestra.cli.planner.advice import Apart, Turns, advise, apart_of, in_turns
from palestra.cli.planner.case import Case
from palestra.cli.planner.dims import dims_of
from palestra.cli.planner.examples import OURS, PUBLIC, data_of
from palestra.cli.planner.memory import GIB
from palestra.cli.planner.plan import case_of
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.quantities import quantities
from palestra.cli.planner.sections import PlanModel
from palestra.cli.planner.types import Example, Grade, Quantity
from palestra.trainer.layout.types import ModelDims

RECIPES = (*OURS, *PUBLIC)


def case(recipe: str, **changes: Any) -> Case:
    """A recipe with fields changed; `__` stands for the dot of a path."""
    found, findings, _, _ = case_of(data_of(Example(recipe, {key.replace("__", "."): changes[key] for key in changes})))
    assert found is not None, findings
    return found


def numbers(recipe: str, **changes: Any) -> Mapping[str, Quantity]:
    """Its quantities by id."""
    return {each.id: each for each in quantities(case(recipe, **changes))}


WORKED: Mapping[str, tuple[float, Grade]] = {
    "train.dp": (2, Grade.EXACT),
    "train.edp": (1, Grade.EXACT),
    "train.stage.0.activations_bytes": (1.55 * GIB, Grade.ESTIMATE),
    "train.stage.0.logits_bytes": (2.03 * GIB, Grade.ESTIMATE),
    "train.gpu_bytes": (30.3 * GIB, Grade.ESTIMATE),
    "hardware.gpu_bytes": (79.1 * GIB, Grade.EXACT),
    "train.host_bytes": (341.7 * GIB, Grade.EXACT),
    "engine.weights_bytes": (28.44 * GIB, Grade.EXACT),
    "engine.pool_bytes": (38.80 * GIB, Grade.EXACT),
    "engine.kv_tokens": (847_593, Grade.EXACT),
    "engine.running": (86, Grade.ESTIMATE),
    "engine.held_tokens": (98_986, Grade.ESTIMATE),
    "engine.held_tokens_unshared": (176_128, Grade.ESTIMATE),
    "engine.decode_step_s": (11.57e-3, Grade.ESTIMATE),
    "engine.decode_tok_s": (4_459, Grade.GUESS),
    "time.rollout_s": (39.2, Grade.GUESS),
    "time.tail_s": (12.8, Grade.GUESS),
    "time.train_s": (16.7, Grade.GUESS),
    "time.publish_s": (2.22, Grade.GUESS),
    "time.sync_s": (58.1, Grade.GUESS),
    "time.async_s": (41.4, Grade.GUESS),
    "time.speedup": (1.40, Grade.GUESS),
    "schedule.in_flight": (242, Grade.GUESS),
    "schedule.in_flight_cap": (512, Grade.EXACT),
    "algo.zero_variance": (0.0175, Grade.ESTIMATE),
    "algo.groups_to_submit": (32.6, Grade.ESTIMATE),
    "run.checkpoint_bytes": (427.4e9, Grade.EXACT),
}
"""Worked out by hand for qwen3-30b-a3b on two nodes (the recipe `two-nodes`), to the digits that are written here."""


@pytest.mark.parametrize("name", WORKED)
def test_the_worked_example_comes_out(name: str) -> None:
    value, grade = WORKED[name]
    found = numbers("two-nodes")[name]
    assert found.value == pytest.approx(value, rel=4e-3)
    assert found.grade is grade


def test_its_training_state_is_weights_and_gradients() -> None:
    found = numbers("two-nodes")
    state = sum(found[f"train.stage.0.{part}_bytes"].value for part in ("weights", "gradients", "optimizer"))
    assert state == pytest.approx(22.46 * GIB, rel=1e-3)


def test_without_chunks_its_logits_are_as_many_as_its_tokens() -> None:
    assert numbers("two-nodes", train__logprob_chunk_tokens=0)["train.stage.0.logits_bytes"].value == pytest.approx(
        10.15 * GIB, rel=1e-3
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_have_an_id_each_a_formula_and_plain_terms(recipe: str) -> None:
    found = quantities(case(recipe))
    assert len({each.id for each in found}) == len(found)
    for each in found:
        assert each.formula, each.id
        assert all(type(value) in (int, float) for value in each.terms.values()), each
        assert (each.grade is Grade.GUESS) <= (each.override is not None), each


MEASURES: Mapping[str, float] = {
    "workload.measured.decode_tok_s": 3_000.0,
    "workload.measured.prefill_tok_s": 90_000.0,
    "workload.measured.train_tok_s": 5_000.0,
    "workload.measured.publish_s": 4.0,
    "workload.measured.delta_density": 0.01,
    "workload.measured.kv_bw": 2e10,
    "workload.measured.prefix_hit": 0.5,
    "workload.measured.peak_train_bytes": 5e10,
    "hardware.shared_fs_bw": 7e9,
    "hardware.pcie_bw": 4e10,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_guess_asks_for_replaces_it(recipe: str) -> None:
    changes: dict[str, float] = {}
    extra = {"rollout__hicache": True} if recipe in PUBLIC else {}
    for _ in range(len(MEASURES)):
        found = numbers(recipe, **extra, **{key.replace(".", "__"): value for key, value in changes.items()})
        asked = {each.override for each in found.values() if each.override is not None}
        if not asked:
            break
        assert asked.isdisjoint(changes), "a measured value still asks to be measured"
        changes.update({name: MEASURES[name] for name in asked})
    assert {name for name, each in found.items() if each.grade is Grade.GUESS} == set()


def test_a_measured_value_is_what_comes_out() -> None:
    found = numbers(
        "two-nodes",
        workload__measured={
            "decode_tok_s": 3_000.0,
            "train_tok_s": 5_000.0,
            "publish_s": 4.0,
            "peak_train_bytes": 5e10,
        },
    )
    assert found["engine.decode_tok_s"].value == pytest.approx(3_000)
    assert found["time.rollout_s"].value == pytest.approx(256 * 2048 / (3 * 3_000))
    assert found["time.train_s"].value == pytest.approx(256 * 3072 / (5_000 * 8))
    assert found["time.publish_s"].value == 4.0
    assert found["train.gpu_bytes"].value == 5e10


def test_a_publish_of_changes_takes_its_own_time() -> None:
    changes = {"weights__transport": "disk", "weights__mode": "delta", "weights__local_dir": "/nvme/x"}
    found = numbers("two-nodes", **changes)
    assert found["time.publish_s"].value == found["weights.delta_s"].value
    dense = numbers("two-nodes", **changes, workload__measured={"delta_density": 0.9})
    assert dense["time.publish_s"].value > dense["weights.full_s"].value


def test_a_second_cache_that_costs_more_than_it_saves_is_below_zero() -> None:
    changes = {"rollout__hicache": True, "workload__measured": {"prefix_hit": 0.0}}
    assert numbers("qwen3-30b", **changes)["rollout.hicache_saved_s"].value < 0
    changes = {"rollout__hicache": True, "workload__measured": {"prefix_hit": 0.9, "prefill_tok_s": 1_000.0}}
    assert numbers("qwen3-30b", **changes)["rollout.hicache_saved_s"].value > 0


def test_groups_that_cannot_differ_leave_no_number_of_groups() -> None:
    found = numbers("two-nodes", workload__success_rate=1.0)
    assert found["algo.zero_variance"].value == 1
    assert "algo.groups_to_submit" not in found


@pytest.mark.parametrize(
    "changes",
    [
        {"placement.train_gpus": 0},
        {"placement.rollout_gpus": 0},
        {"hardware.gpu": "nothing-known"},
        {"hardware.gpu": "custom"},
        {"placement.mode": "external", "rollout.pd": None},
        {"rollout.engine": "openai", "rollout.pd": None},
        {"train.pp": 7},
        {"model": {"layers": 2, "hidden": 8, "heads": 16, "kv_heads": 1, "vocab": 1, "experts": 2, "topk": 9}},
        {"model": {"layers": 2, "hidden": 8, "heads": 1, "kv_heads": 1, "vocab": 1, "linear_layers": 9}},
        {"model": {"layers": 2, "hidden": 8, "heads": 1, "kv_heads": 1, "vocab": 1, "linear_layers": 2}},
        {"algo.group_size": 1},
        {"placement.mode": "cpu", "train.pp": 2, "rollout.pd": None},
        {"rollout.dp_attention": True, "rollout.dp": 9},
        {"rollout.max_running": 1, "schedule.max_in_flight": 1},
    ],
)
def test_numbers_of_broken_plans_do_not_raise(changes: Mapping[str, Any]) -> None:
    found, findings, _, _ = case_of(data_of(Example("two-nodes", changes)))
    assert found is not None, findings
    assert quantities(found)
    assert isinstance(advise(found), tuple)


def test_attention_in_copies_gives_an_engine_a_cache_for_each() -> None:
    one, many = numbers("deepseek-v3"), numbers("deepseek-v3", rollout__dp=16)
    assert many["engine.kv_tokens"].value > one["engine.kv_tokens"].value
    assert many["engine.weights_bytes"].value > one["engine.weights_bytes"].value


def test_what_does_not_fit_waits() -> None:
    roomy, tight = case("qwen3-30b"), case("qwen3-30b", rollout__max_total_tokens=100_000)
    assert roomy.times is not None
    assert tight.times is not None
    assert tight.times.running == tight.fit_running
    assert tight.times.running < roomy.times.running
    assert tight.times.rollout_s > roomy.times.rollout_s


def test_prefill_and_decode_are_split_by_their_rates() -> None:
    slow = case("two-nodes", workload__measured={"prefill_tok_s": 300.0, "decode_tok_s": 9_000.0}).pd_flow
    assert slow is not None
    assert slow.limit == "prefill"
    assert slow.best_prefill == 2
    thin = case("two-nodes", workload__measured={"kv_bw": 1e8}).pd_flow
    assert thin is not None
    assert (thin.limit, thin.rate) == ("transfer", pytest.approx(1e8 / thin.kv_bytes))


def compared(name: str, **changes: Any) -> tuple[Turns, Apart | None, tuple[str, ...]]:
    """Both placements of a recipe, and what is said of them."""
    found = case(name, **changes)
    assert found.times is not None
    return in_turns(found, found.times), apart_of(found, found.times), advise(found)


@pytest.mark.parametrize("recipe", ["two-nodes", "many-nodes"])
def test_two_pools_are_as_long_as_the_plan_of_two_pools_says(recipe: str) -> None:
    _, apart, _ = compared(recipe)
    assert apart is not None
    times = case(recipe).times
    assert times is not None
    assert (apart.rollout_gpus, apart.train_gpus) == (case(recipe).rollout_gpus, case(recipe).train_gpus)
    assert apart.step_s == pytest.approx(times.step.overlapped)


def test_turns_are_as_long_as_the_plan_of_turns_says() -> None:
    turns, _, _ = compared("qwen3-4b")
    found = case("qwen3-4b")
    assert found.times is not None
    assert turns.step_s == pytest.approx(found.times.step.sync + found.swap_s)


def test_the_split_is_the_best_there_is() -> None:
    _, apart, _ = compared("many-nodes", workload__response_tokens=500)
    assert apart is not None
    for train in (32, 64, 96, 128, 160, 192, 224):
        other = case(
            "many-nodes",
            workload__response_tokens=500,
            placement__train_gpus=train,
            placement__rollout_gpus=256 - train,
        )
        assert other.times is not None
        assert apart.step_s <= other.times.step.overlapped * (1 + 1e-9)


def test_a_long_tail_asks_for_two_pools_and_even_replies_for_turns() -> None:
    _, _, tail = compared("qwen3-4b", workload__response_p99=8_192)
    assert tail[0].startswith("Separate:")
    assert any("longest replies" in each for each in tail)
    _, _, even = compared("qwen3-4b", workload__response_p99=4_000, workload__response_tokens=4_000)
    assert even[0].startswith("Colocated:")


def test_a_layout_that_needs_all_gpus_leaves_turns() -> None:
    turns, apart, said = compared("qwen3-30b")
    assert apart is None
    assert said[0].startswith(f"Colocated: in turns on {turns.gpus} GPUs")


def test_training_that_fits_on_no_fewer_gpus_leaves_turns() -> None:
    _, apart, _ = compared("qwen3-4b", hardware__gpu_mem_bytes=20 * GIB)
    assert apart is None


def test_without_gpus_the_slower_process_is_named() -> None:
    (said,) = advise(case("laptop"))
    assert "training sets the pace" in said
    (said,) = advise(case("laptop", workload__measured={"decode_tok_s": 10.0, "train_tok_s": 9_000.0}))
    assert "sampling sets the pace" in said


def test_nothing_is_advised_where_nothing_is_known() -> None:
    assert advise(case("two-nodes", hardware__gpu="custom")) == ()


def test_a_preset_and_a_file_are_both_held_to() -> None:
    file = {"layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": 151936}
    dims, findings = dims_of(PlanModel(preset="qwen3-30b-a3b"), {**file, "max_position": 262_144})
    assert findings == ()
    assert dims == replace(MODELS["qwen3-30b-a3b"], max_position=262_144)
    dims, (finding,) = dims_of(PlanModel(preset="qwen3-30b-a3b"), {**file, "layers": 47})
    assert dims is None
    assert (finding.code, finding.path) == ("P004", "model.preset")
    assert "layers = 47" in finding.message
    assert "48" in finding.message


def test_a_preset_may_say_that_the_file_counts() -> None:
    file = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "vocab": 16}
    dims, findings = dims_of(PlanModel(preset="hf"), file)
    assert findings == ()
    assert dims == ModelDims(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=16)
    assert [each.code for each in dims_of(PlanModel(preset="hf"))[1]] == ["P003"]


@pytest.mark.parametrize(("name", "close"), [("qwen3-30b", "qwen3-30b-a3b"), ("zzz", None)])
def test_an_unknown_preset_is_refused_with_those_that_are_known(name: str, close: str | None) -> None:
    dims, (finding,) = dims_of(PlanModel(preset=name))
    assert dims is None
    assert finding.code == "P003"
    assert "; known: smollm2-135m, " in finding.message
    assert ("did you mean" in finding.message) == (close is not None)
    assert close is None or close in finding.message
