"""Rules about memory, disks, boxes and services, and the search for what fits."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from palestra.cli.planner.boxes import backend_of, box_demand
from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import OURS, PUBLIC, changed, data_of
from palestra.cli.planner.fitting import MOST_JUDGED, Search, Trial, first, fit_training, pipeline_ends, tried
from palestra.cli.planner.memory import GIB
from palestra.cli.planner.plan import case_of, judge, plan
from palestra.cli.planner.presets import DEVICES, MODELS
from palestra.cli.planner.rules import registry
from palestra.cli.planner.rules.memory import host_items
from palestra.cli.planner.rules.pools import checkpoint_size
from palestra.cli.planner.types import Example, Finding, Severity
from palestra.envs.findings import RefusedError
from palestra.envs.sandboxes import SandboxConfig

ROOT = Path(__file__).resolve().parent.parent
OWN = [code for code in registry() if code[:2] in ("P8", "P9")]
H100 = DEVICES["h100-80"].memory_bytes
TIGHT = {"train.optimizer_offload": 0.0}
"""Makes qwen3-30b's training 83.7 GiB of 79.1."""


def case(recipe: str, **changes: Any) -> Case:
    found = case_of(data_of(Example(recipe, {path.replace("__", "."): value for path, value in changes.items()})))[0]
    assert found is not None
    return found


def found(code: str, recipe: str, changes: Mapping[str, Any]) -> Finding | None:
    report = plan(data_of(Example(recipe, changes)))
    return next((each for each in report.findings if each.code == code), None)


def errors(data: Mapping[str, Any]) -> set[str]:
    return {each.code for each in plan(data).of(Severity.ERROR)}


# The search


def fits(limit: float = H100) -> Callable[[Case], bool]:
    return lambda each: 0 < each.worst_train_bytes <= limit


def test_the_mildest_single_change_is_suggested_first() -> None:
    whole = case("qwen3-30b", train__optimizer_offload=0.0)
    assert fit_training(whole, H100, judge) == {"train.max_tokens_per_gpu": 10240}
    assert fit_training(whole, 0.9 * H100, judge) == {"train.optimizer_offload": 1.0}


def test_recomputation_comes_before_what_changes_the_layout() -> None:
    kept = case("qwen3-30b", train__recompute="none", train__max_tokens_per_gpu=10240, algo__max_prompt=2048)
    limit = case("qwen3-30b", train__max_tokens_per_gpu=10240).worst_train_bytes
    assert fit_training(kept, limit, judge) == {"train.recompute": "full"}


def test_several_changes_together_are_pruned_to_what_is_needed() -> None:
    whole = case("qwen3-30b", train__optimizer_offload=0.0, train__recompute="none")
    both = tried(whole, {"train.recompute": "full", "train.optimizer_offload": 1.0})
    changes = fit_training(whole, both.worst_train_bytes, judge)
    assert fits(both.worst_train_bytes)(tried(whole, changes))
    assert len(changes) > 1
    for path in changes:
        less = {each: value for each, value in changes.items() if each != path}
        assert not fits(both.worst_train_bytes)(tried(whole, less)), path


def test_what_the_host_has_no_room_for_is_not_offloaded() -> None:
    poor = {"placement.offload_train": False, "hardware.host_mem_bytes": 200_000_000_000, "placement.mode": "separate"}
    nodes = {"hardware.nodes": 2, "placement.train_gpus": 8, "placement.rollout_gpus": 8, **TIGHT, **poor}
    data = data_of(Example("qwen3-30b", {**nodes, "train.max_tokens_per_gpu": 10240}))
    short = case_of(data)[0]
    assert short is not None
    changes = fit_training(short, 0.8 * H100, judge)
    assert "train.optimizer_offload" not in changes
    assert "P806" in errors(changed(data, {"train.optimizer_offload": 1.0}))


def test_the_layout_is_changed_where_nothing_else_is_enough() -> None:
    dense = {"model.preset": "qwen3-32b", "train.tp": 1, "train.optimizer_offload": 1.0, "rollout.gpus_per_engine": 4}
    dense["hardware.host_mem_bytes"] = 4 * 10**12
    data = data_of(Example("qwen3-4b", dense))
    assert errors(data) == {"P801"}
    finding = found("P801", "qwen3-4b", dense)
    assert finding is not None
    assert set(finding.suggest) & {"train.tp", "train.pp"}, finding
    assert errors(changed(data, finding.suggest)) == set()


def test_no_change_is_suggested_where_none_fits() -> None:
    data = data_of(Example("qwen3-4b", {"model.preset": "qwen3-235b-a22b", "rollout.gpus_per_engine": 8}))
    finding = next(each for each in plan(data).findings if each.code == "P801")
    assert not finding.suggest
    assert "more GPUs" in finding.fix


def test_a_search_judges_a_bounded_number_of_cases() -> None:
    asked: list[Case] = []

    def judged(each: Case) -> Iterable[Finding]:
        asked.append(each)
        return ()

    search = Search(case("qwen3-4b"), lambda each: True, judged)
    assert [search.fits({"train.tp": 2}) for _ in range(MOST_JUDGED + 5)] == [True] * MOST_JUDGED + [False] * 5
    assert len(asked) == MOST_JUDGED + 1


def test_a_candidate_that_brings_an_error_is_passed_over() -> None:
    def judged(each: Case) -> Iterable[Finding]:
        if each.input.train.tp == 4:
            yield Finding("P204", Severity.ERROR, "train.tp", "")
        yield Finding("P999", Severity.ERROR, "there.anyway", "")

    candidates = [{"train.tp": 2}, {"train.tp": 4}, {"train.tp": 8}]
    assert first(case("qwen3-4b"), candidates, lambda each: each.input.train.tp > 2, judged) == {"train.tp": 8}
    search = Search(case("qwen3-4b"), lambda each: True, judged)
    assert [search.fits(each) for each in candidates] == [True, False, True]


def test_a_tried_case_is_the_case_of_the_changed_tables() -> None:
    changes = {"train.tp": 8, "train.last_stage_layers": None, "rollout.mem_fraction": 0.8, "train.pp": 2}
    by_tables = case("qwen3-235b", **{path.replace(".", "__"): value for path, value in changes.items()})
    by_search = tried(case("qwen3-235b"), changes)
    assert by_search.input == by_tables.input
    assert by_search.train_bytes() == by_tables.train_bytes()


def test_rules_do_not_search_in_a_trial() -> None:
    for code in ("P801", "P802", "P803", "P804", "P806", "P808", "P811", "P812"):
        rule = registry()[code]
        whole = case_of(data_of(rule.fails))[0]
        assert whole is not None
        within = list(rule.findings(Trial(whole.input, whole.model)))
        assert within, code
        assert not any(each.suggest for each in within), code


def test_ends_of_a_pipeline_hold_all_layers() -> None:
    for recipe in ("qwen3-235b", "deepseek-v3", "qwen3-next"):
        whole = case(recipe)
        ends = list(pipeline_ends(whole))
        assert ends
        for changes in ends:
            spread = tried(whole, changes).stages
            assert spread is not None
            assert sum(spread) == whole.model.layers
            assert min(spread) >= 1


# Memory


def test_what_training_holds_is_told_by_item() -> None:
    finding = found("P801", "qwen3-30b", TIGHT)
    assert finding is not None
    assert "state 65.2 + activations 1.5 + logits 10.2" in finding.message
    assert "= 83.7 GiB" in finding.message
    assert "79.1" in finding.message


def test_what_was_measured_replaces_the_formula() -> None:
    measured = {"workload.measured.peak_train_bytes": 70 * GIB}
    assert found("P801", "qwen3-30b", {**TIGHT, **measured}) is None
    full = found("P801", "qwen3-30b", {**TIGHT, "workload.measured.peak_train_bytes": 90 * GIB})
    assert full is not None
    assert "measured to take 90.0 GiB" in full.message
    assert full.suggest == {"train.optimizer_offload": 1.0, "workload.measured.peak_train_bytes": None}


def test_without_gpus_the_host_is_what_training_has_to_fit() -> None:
    small = {"hardware.host_mem_bytes": 100_000_000}
    finding = found("P801", "laptop", small)
    assert finding is not None
    assert finding.severity is Severity.ERROR
    assert found("P801", "laptop", {"hardware.host_mem_bytes": 0}) is None


def test_without_gpus_training_and_engines_share_the_host() -> None:
    items = host_items(case("laptop"))
    assert set(items) == {"training", "engines"}
    total = sum(items.values())
    finding = found("P806", "laptop", {"hardware.host_mem_bytes": int(1.05 * total)})
    assert finding is not None
    assert "engines" in finding.message
    assert found("P806", "laptop", {"hardware.host_mem_bytes": int(1.2 * total)}) is None


def test_the_embedded_engine_has_room_for_what_runs_beside_its_pool() -> None:
    assert found("P804", "laptop", {"rollout.max_total_tokens": 256}) is None
    assert found("P804", "laptop", {"rollout.max_total_tokens": 256, "rollout.engine": "sglang"}) is not None


def test_boxes_may_be_bounded_together() -> None:
    many = {**registry()["P904"].fails.changes}
    assert found("P904", "many-nodes", many) is not None
    assert found("P904", "many-nodes", {**many, "sandbox.total_memory_bytes": 200 * GIB}) is None


def test_a_node_holds_the_optimizer_and_what_makes_way_for_engines() -> None:
    items = host_items(case("qwen3-30b"))
    assert items["optimizer"] / GIB == pytest.approx(341.7, abs=0.1)  # 8 * G4.4
    assert items["training state while engines sample"] / GIB == pytest.approx(8 * 22.46, abs=0.1)
    apart = host_items(case("two-nodes"))
    assert apart["optimizer"] / GIB == pytest.approx(341.7, abs=0.1)
    assert "training state while engines sample" not in apart
    delta = host_items(case("two-nodes", weights__mode="delta", weights__transport="disk"))
    assert delta["weights that the last delta was made of"] == pytest.approx(2 * 30_532_122_624)


def test_a_host_whose_memory_is_not_given_gets_a_note() -> None:
    finding = found("P806", "qwen3-30b", {"hardware.host_mem_bytes": 0})
    assert finding is not None
    assert finding.severity is Severity.NOTE


def test_an_optimizer_that_is_too_large_for_the_hosts_is_offloaded_in_part() -> None:
    # In separate pools nothing else of training is on the hosts; a GPU has room for a part of it.
    finding = found("P806", "two-nodes", {"hardware.host_mem_bytes": 350_000_000_000})
    assert finding is not None
    assert 0 < finding.suggest["train.optimizer_offload"] < 1


def test_chunks_of_logits_that_are_small_enough_are_suggested() -> None:
    finding = found("P807", "qwen3-next", {})
    assert finding is not None
    assert finding.suggest == {"train.logprob_chunk_tokens": 4096}
    assert "34.5 of 79.1" in finding.message


@pytest.mark.parametrize(("fraction", "severity"), [(0.85, None), (0.92, Severity.NOTE), (0.96, Severity.WARNING)])
def test_memory_beside_the_pools_is_noted_and_then_warned_of(fraction: float, severity: Severity | None) -> None:
    finding = found("P811", "two-nodes", {"rollout.mem_fraction": fraction})
    assert (finding and finding.severity) == severity


def test_groups_of_attention_have_caches_of_their_own() -> None:
    # One copy has 512,107 tokens (F6), eight of them room for the 512 rollouts of an engine.
    whole = case("deepseek-v3")
    assert whole.pool is not None
    assert whole.pool.kv_tokens < whole.held.shared < 8 * whole.pool.kv_tokens
    assert found("P805", "deepseek-v3", {}) is None


def test_rollouts_that_do_not_share_their_prompts_need_more_room() -> None:
    changes = {"rollout.max_total_tokens": 90_000}
    assert found("P805", "qwen3-4b", changes) is None
    finding = found("P805", "qwen3-4b", {**changes, "rollout.prefix_cache": False, "workload.prompt_tokens": 900})
    assert finding is not None
    assert finding.suggest == {"rollout.max_running": 41}  # 90,000 // (900 + 2,500 / 2)


@pytest.mark.parametrize("changes", [{"placement.mode": "external"}, {"rollout.engine": "openai"}])
def test_engines_that_run_elsewhere_are_not_held_to_memory(changes: dict[str, Any]) -> None:
    codes = {each.code for each in plan(data_of(Example("qwen3-4b", changes))).findings}
    assert codes.isdisjoint({"P803", "P804", "P805", "P811", "P812"})


def test_checkpoints_are_counted_with_the_one_that_is_written() -> None:
    assert checkpoint_size(case("qwen3-30b")) == pytest.approx(427.4e9, rel=1e-3)  # G17.1
    free = {"run.keep_checkpoints": 3, "run.free_disk_bytes": 1_709_000_000_000}
    finding = found("P809", "qwen3-30b", free)
    assert finding is not None
    assert "1,709.8 GB" in finding.message
    assert finding.suggest == {"run.keep_checkpoints": 2}
    assert found("P809", "qwen3-30b", {**free, "run.free_disk_bytes": 1_710_000_000_000}) is None


# Boxes and services


def test_boxes_follow_littles_law() -> None:
    whole = case("many-nodes", sandbox__create_s=1.0, sandbox__busy_s=60.0, sandbox__destroy_s=0.0)
    demand = box_demand(whole)
    assert demand is not None
    assert whole.times is not None
    episodes = whole.rollouts / whole.times.period_s
    assert demand.rate == pytest.approx(2 * episodes)  # its own, and its grader's
    assert demand.needed == pytest.approx(episodes * (2 * 1.0 + 60.0))


def test_a_box_is_kept_while_the_model_speaks() -> None:
    apart = box_demand(case("many-nodes"))
    assert apart is not None
    tools = 2.5 * 2.0
    assert apart.busy_s * 2 > 10 * tools
    judged = box_demand(case("two-nodes"))
    assert judged is not None
    assert judged.busy_s == 0.0


def test_a_table_without_a_kind_means_the_first_that_works() -> None:
    assert backend_of(case("qwen3-4b")) == "none"
    assert backend_of(case("qwen3-4b", sandbox__boxes=4)) == "auto"
    assert found("P902", "qwen3-4b", {"sandbox.boxes": 4}) is not None
    for changes in ({}, {"sandbox.boxes": 4}):
        report = plan(data_of(Example("qwen3-4b", changes)))
        again = plan(report.resolved)
        assert [each.code for each in again.findings] == [each.code for each in report.findings]


def test_no_sandbox_needs_no_boxes() -> None:
    assert box_demand(case("qwen3-4b")) is None


@pytest.mark.parametrize(
    ("values", "code"), [({"boxes": 0}, "P902"), ({"boxes": -3}, "P902"), ({"backend": "unsafe_subprocess"}, "P905")]
)
def test_a_run_refuses_what_a_plan_does(values: dict[str, Any], code: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SandboxConfig(**values)
    (fault,) = caught.value.errors()
    refused = fault["ctx"]["error"]
    assert isinstance(refused, RefusedError)
    assert refused.finding.code == code


def test_what_both_refuse_is_found_once_and_under_its_code() -> None:
    report = plan(data_of(Example("many-nodes", {"sandbox.boxes": 0})))
    assert [each.code for each in report.of(Severity.ERROR)] == ["P902"]


def test_fewer_boxes_than_a_group_are_a_warning() -> None:
    finding = found("P902", "two-nodes", {"sandbox.boxes": 4})
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.suggest == {"sandbox.boxes": 8}


def test_boxes_of_other_machines_are_not_held_to_this_one() -> None:
    changes = {"sandbox.memory_bytes": 2**32, "hardware.host_cores": 1}
    here = {"P903", "P904", "P907"}
    near = plan(data_of(Example("many-nodes", {**changes, "sandbox.backend": "docker", "sandbox.hosts": None})))
    assert here <= {each.code for each in near.findings}
    codes = {each.code for each in plan(data_of(Example("many-nodes", changes))).findings}
    assert codes.isdisjoint(here)


def test_a_run_on_a_cpu_that_was_not_measured_gets_no_finding_about_times() -> None:
    unmeasured = {"workload.measured.decode_tok_s": None, "workload.tool_s": 900.0, "sandbox.backend": "docker"}
    wall = {"run.steps": 10**6, "run.wall_clock_s": 1.0}
    codes = {each.code for each in plan(data_of(Example("laptop", {**unmeasured, **wall}))).findings}
    assert codes.isdisjoint({"P901", "P903", "P908", "P909"})
    measured = {each.code for each in plan(data_of(Example("laptop", {"workload.tool_s": 900.0, **wall}))).findings}
    assert {"P908", "P909"} <= measured


def test_a_buffer_on_a_network_is_warned_of_and_one_on_a_disk_noted() -> None:
    near = found("P910", "two-nodes", {"run.buffer_dir": "/nvme/buffer"})
    assert near is not None
    assert near.severity is Severity.NOTE
    assert "6.3 MB a step" in near.message  # 256 rollouts of 3,072 tokens, 8 bytes each
    far = found("P910", "two-nodes", {"run.buffer_dir": "/shared/buffer", "run.buffer_on_network": True})
    assert far is not None
    assert far.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("name", "model"),
    [("calculator-smollm2", "smollm2-135m"), ("search-tiny", "tiny-qwen3-moe"), ("code-smollm2", "smollm2-135m")],
)
def test_runs_that_say_nothing_of_hardware_get_no_finding(name: str, model: str) -> None:
    tables = tomllib.loads((ROOT / f"examples/{name}.toml").read_text(encoding="utf-8"))
    report = plan(tables, asdict(MODELS[model]))
    assert [each for each in report.findings if each.code in OWN] == []


# All of them

VALUES: Mapping[str, tuple[Any, ...]] = {
    "hardware.gpu": ("cpu", "h100-80", "rtx4090-24", "h300"),
    "hardware.host_mem_bytes": (0, 16 * GIB, 2**41),
    "hardware.host_cores": (0, 2, 192),
    "placement.mode": (None, "colocated", "separate", "external", "cpu"),
    "placement.train_gpus": (None, 0, 1, 8, 12),
    "placement.rollout_gpus": (None, 0, 3, 8),
    "placement.reference": ("none", "shared"),
    "train.tp": (1, 3, 8),
    "train.pp": (1, 2, 4, 7),
    "train.cp": (1, 2),
    "train.optimizer_offload": (0.0, 1.0),
    "train.max_tokens_per_gpu": (None, 1, 65536),
    "train.dtype": (None, "fp32"),
    "rollout.engine": ("sglang", "openai", "embedded"),
    "rollout.mem_fraction": (None, 0.1, 0.97),
    "rollout.gpus_per_engine": (1, 2, 8),
    "rollout.max_total_tokens": (None, 256),
    "rollout.max_running": (None, 1),
    "schedule.kind": ("sync", "async"),
    "weights.mode": ("full", "delta"),
    "sandbox.backend": (None, "bubblewrap", "docker", "unsafe_subprocess"),
    "sandbox.boxes": (None, 0, 1, 4096),
    "workload.tool_s": (0.0, 1000.0),
    "workload.measured.peak_train_bytes": (None, 1.0, 1e12),
    "run.free_disk_bytes": (None, 0, 10**12),
    "run.wall_clock_s": (None, 1.0),
    "run.buffer_dir": (None, "/b"),
}


def some(drawn: random.Random, fields: int) -> dict[str, Any]:
    """A recipe's tables with so many fields changed."""
    changes = {path: drawn.choice(VALUES[path]) for path in drawn.sample(sorted(VALUES), fields)}
    if "sandbox.backend" in changes:
        changes["sandbox.hosts"] = None  # they belong to another backend
    return data_of(Example(drawn.choice((*PUBLIC, *OURS)), changes))


def test_rules_answer_whatever_the_input() -> None:
    """Each rule is asked by itself: also where another one would have kept it from being asked."""
    drawn = random.Random(8)
    for _ in range(80):
        data = some(drawn, 6)
        whole = case_of(data)[0]
        assert whole is not None, data
        for code in OWN:
            for finding in registry()[code].findings(Trial(whole.input, whole.model)):
                assert finding.message, data


def test_what_is_suggested_removes_the_finding_and_adds_no_error() -> None:
    drawn = random.Random(9)
    tested = set()
    for _ in range(30):
        data = some(drawn, 3)
        report = plan(data)
        before = {(each.code, each.path) for each in report.of(Severity.ERROR)}
        for finding in report.findings:
            if finding.code in OWN and finding.suggest:
                tested.add(finding.code)
                after = plan(changed(data, finding.suggest))
                assert (finding.code, finding.path) not in {(each.code, each.path) for each in after.findings}, finding
                assert {(each.code, each.path) for each in after.of(Severity.ERROR)} <= before, finding
    assert len(tested) >= 5
