"""Rules of schedule, weights and batch beyond their own examples: numbers, units, and what a run's own validators say of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from palestra.cli.config import ConfigError, check_config
from palestra.cli.planner.examples import changed, data_of
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.types import Example, Finding, Severity
from palestra.cli.train import check_inputs
from palestra.server.config import ScheduleConfig
from palestra.server.schedulerules import bound, least_findings

OURS = ("P5", "P6", "P7")
DELTA = {"weights.mode": "delta", "weights.transport": "disk"}
ELSEWHERE = {
    "placement.mode": "external",
    "placement.rollout_gpus": None,
    "rollout.pd": None,
    "hardware.shared_dir": None,
    "weights.transport": "disk",
}


def found(recipe: str, changes: Mapping[str, Any]) -> dict[str, Finding]:
    """Findings of these families by code."""
    report = plan(data_of(Example(recipe, changes)))
    return {each.code: each for each in report.findings if each.code.startswith(OURS)}


def plain(**tables: Mapping[str, Any]) -> dict[str, Any]:
    """The file of a run that says little."""
    return {"model": {"path": "m", "preset": "smollm2-135m"}, "env": {"id": "e"}, **tables}


@pytest.mark.parametrize("preset", ["smollm2-135m", "tiny-qwen3-moe"])
def test_a_plain_run_is_told_nothing_but_notes(preset: str) -> None:
    tables: list[dict[str, Any]] = [
        {},
        {"algo": {"groups_per_step": 4, "max_response": 40, "max_turns": 3, "temperature": 1.0, "std_normalise": True}},
        {"rollout": {"context_len": 4096}, "train": {"max_tokens_per_gpu": 1024}, "algo": {"kl_coef": 0.1}},
        {"schedule": {"kind": "async", "max_staleness": 2}, "algo": {"updates_per_batch": 2}},
        {"schedule": {"kind": "one_step_off", "publish_every": 1}, "weights": {"transport": "tensor"}},
        {"algo": {"oversample": 1.5}, "schedule": {"max_staleness": 4}},
        {"schedule": {"max_staleness": 4, "partial": "resume", "generation_budget_s": 5.0, "colocated": True}},
        {
            "rollout": {"engine": "sglang", "urls": ["http://e"], "agents": {"http://e": "http://a"}},
            "weights": {"mode": "delta"},
        },
    ]
    for each in tables:
        report = plan({**plain(**each), "model": {"preset": preset}})
        told = [finding for finding in report.findings if finding.code.startswith(OURS)]
        assert {finding.severity for finding in told} <= {Severity.NOTE}, (each, told)


@pytest.mark.parametrize(
    ("tables", "code"),
    [
        ({"schedule": {"kind": "async"}}, "P501"),
        ({"schedule": {"max_staleness": 3}}, "P501"),
        ({"schedule": {"kind": "one_step_off", "max_staleness": 3}}, "P501"),
        ({"schedule": {"kind": "async", "max_staleness": 1, "publish_every": 4}}, "P502"),
        ({"schedule": {"partial": "resume", "max_staleness": 1}}, "P518"),
        ({"schedule": {"generation_budget_tokens": 5}}, "P518"),
        ({"schedule": {"partial_old_tokens": "mask"}}, "P518"),
        ({"schedule": {"partial": "resume", "generation_budget_s": 5.0}}, "P519"),
        ({"algo": {"oversample": 2.0}}, "P519"),
        ({"schedule": {"kind": "one_step_off", "colocated": True}}, "P520"),
        ({"algo": {"oversample": 2.0}, "schedule": {"kind": "one_step_off"}}, "P521"),
        ({"weights": {"mode": "delta", "transport": "tensor"}}, "P605"),
        ({"weights": {"mode": "delta"}}, "P616"),
        ({"weights": {"mode": "delta"}, "rollout": {"engine": "sglang", "urls": ["http://e"]}}, "P616"),
        ({"train": {"backend": "fsdp"}, "megatron": {"x": 1}}, "P002"),
        ({"sglang": {"x": 1}}, "P002"),
        ({"router": {"x": 1}, "rollout": {"engine": "sglang"}}, "P002"),
        ({"algo": {"group_size": 2, "min_group": 3}}, "P720"),
        ({"algo": {"ratio_correction": "none", "ratio_clip": 3.0}}, "P721"),
        ({"algo": {"ratio_correction": "tis", "sequence_clip": 1.2}}, "P721"),
    ],
)
def test_a_run_refuses_in_the_words_that_a_plan_shows(tables: dict[str, Any], code: str) -> None:
    data = plain(**tables)
    report = plan({**data, "model": {"preset": "smollm2-135m"}})
    errors = [each for each in report.of(Severity.ERROR) if each.code == code]
    assert {each.code for each in report.of(Severity.ERROR)} == {code}, report.findings
    with pytest.raises(ConfigError) as refused:
        check_config({**data, "model": {"path": "m"}}, "run.toml")
    assert [line for line in str(refused.value).splitlines() if errors[0].message in line]


@pytest.mark.parametrize(
    ("tables", "code", "said"),
    [
        ({"algo": {"max_response": 2048}}, "P706", "leaves no room for a prompt in 2048 tokens"),
        ({"algo": {"max_context": 256, "max_response": 256}}, "P706", "leaves no room for a prompt in 256 tokens"),
        ({"megatron": {"num_layers": 1}}, "P002", "megatron.num_layers cannot be set here"),
        ({"algo": {"temperature": 0.0}}, "P710", "algo.temperature"),
        ({"algo": {"temperature": math.nan}}, "P710", "algo.temperature"),
        ({"algo": {"temperature": math.inf}}, "P710", "algo.temperature"),
        ({"sglang": 3}, "P002", "sglang"),
        ({"version": 2}, "P002", "version"),
    ],
)
def test_what_training_refuses_before_it_starts_is_an_error_of_its_plan(
    tables: dict[str, Any], code: str, said: str
) -> None:
    data = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}, **tables}
    report = plan({**data, "model": {"preset": "smollm2-135m"}})
    (error,) = report.of(Severity.ERROR)
    assert (error.code, said in error.message) == (code, True), error
    with pytest.raises(ConfigError, match=said):
        check_inputs(check_config(data, "run.toml"))


def test_a_reply_that_fills_the_window_is_shortened() -> None:
    replies = {
        "algo.max_prompt": None,
        "algo.max_context": None,
        "algo.max_response": 2000,
        "rollout.context_len": 2000,
    }
    assert found("laptop", replies)["P706"].suggest == {"algo.max_response": 1000}
    assert "P706" not in found("laptop", {**replies, "algo.max_response": 1999})


def test_keys_of_megatron_that_are_not_built_are_told_as_such() -> None:
    report = plan(data_of(Example("qwen3-4b", {"megatron.tensor_model_parallel_size": 2})))
    assert "megatron.tensor_model_parallel_size" in report.not_built
    assert report.of(Severity.ERROR) == ()


def test_tables_are_passed_on_to_engines_that_a_plan_starts() -> None:
    passed = {"sglang.x": 1, "router.x": 1}
    assert plan(data_of(Example("qwen3-4b", passed))).of(Severity.ERROR) == ()
    one = plan(data_of(Example("qwen3-4b", {**passed, "rollout.engines": 1})))
    assert [(each.code, each.path) for each in one.of(Severity.ERROR)] == [("P002", "router")]


def test_launchers_start_agents_and_training_on_a_cpu_does_not() -> None:
    assert "P616" not in found("two-nodes", DELTA)
    assert "P616" in found("laptop", DELTA)


def test_bounds_count_train_steps_not_optimizer_steps() -> None:
    several = ScheduleConfig(kind="async", max_staleness=1, publish_every=8)
    assert (several.staleness(4), several.publish_steps(4)) == (1, 2)
    assert [each.code for each in least_findings(several, 2)] == ["P502"]
    assert bound(ScheduleConfig(publish_every=6), 4) == 1
    assert bound(ScheduleConfig(kind="one_step_off", publish_every=6), 4) == 2
    # Four updates of one batch age nothing: the published recipe of this size asks for no bound.
    assert {"P501", "P502"}.isdisjoint(found("deepseek-v3", {}))


def test_long_waits_starve_engines_and_a_wider_bound_feeds_them() -> None:
    finding = found("two-nodes", {"workload.tool_s": 120.0})["P503"]
    enough = finding.suggest["schedule.max_staleness"]
    assert enough > 1
    for bound_, starves in ((enough - 1, True), (enough, False)):
        codes = found("two-nodes", {"workload.tool_s": 120.0, "schedule.max_staleness": bound_})
        assert ("P503" in codes) is starves, bound_


def test_a_longer_tail_spans_more_versions_until_the_bound_is_raised() -> None:
    finding = found("two-nodes", {})["P504"]
    versions = float(finding.message.split(" span ")[1].split()[0])
    assert 4 < versions < 6
    assert "P504" in found("two-nodes", {"schedule.max_staleness": int(versions) - 1})
    assert "P504" not in found("two-nodes", {"schedule.max_staleness": int(versions)})
    assert "P504" not in found("two-nodes", {"schedule.too_old": "mask"})


def test_an_asynchronous_bound_of_nothing_is_a_warning() -> None:
    finding = found("laptop", {"schedule.kind": "async", "schedule.max_staleness": 0})["P501"]
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("urls", "needs"), [(["http://127.0.0.1:30000"], False), (["http://127.0.0.1:1", "http://engine-1:1"], True)]
)
def test_engines_on_this_machine_need_no_shared_folder(urls: list[str], needs: bool) -> None:
    assert ("P604" in found("two-nodes", {**ELSEWHERE, "placement.external_urls": urls})) is needs


def test_deltas_are_held_to_disk_space_and_to_an_agent_for_each_engine() -> None:
    small = found("two-nodes", {**DELTA, "hardware.local_free_bytes": 10**9})["P606"]
    assert (small.path, "61.1 GB" in small.message) == ("hardware.local_free_bytes", True)
    urls = {**DELTA, "rollout.urls": ["http://a", "http://b"], "rollout.agents": {"http://a": "http://x"}}
    assert "none for http://b" in found("two-nodes", urls)["P616"].message
    # Break-even of the specification's example: 0.625 at 5 GB/s.
    assert "62%" in found("two-nodes", {**DELTA, "workload.measured.delta_density": 0.7})["P607"].message
    assert "P607" not in found("two-nodes", {**DELTA, "workload.measured.delta_density": 0.6})


def test_an_unverified_folder_is_an_error_only_between_hosts() -> None:
    unverified = {"weights.transport": "disk", "weights.verify": "none"}
    assert found("two-nodes", unverified)["P613"].severity is Severity.ERROR
    assert found("laptop", unverified)["P613"].severity is Severity.WARNING


def test_uneven_updates_are_an_error_where_steps_have_one_size() -> None:
    assert found("qwen3-4b", {"algo.updates_per_batch": 3})["P701"].severity is Severity.ERROR
    assert found("laptop", {"algo.updates_per_batch": 3})["P701"].severity is Severity.WARNING


def test_surplus_for_groups_without_a_difference_follows_the_formula() -> None:
    """Golden vector G15.2: at a success rate of 0.9 groups of 8 waste 43%; 32 of them ask for 56.19."""
    message = found("qwen3-4b", {"workload.success_rate": 0.9})["P712"].message
    assert all(part in message for part in ("43.0%", "56.2", "for 32"))
    for rate in (0.0, 1.0):
        finding = found("qwen3-4b", {"workload.success_rate": rate})["P712"]
        assert "every group" in finding.message
        assert not finding.suggest


def test_the_window_shows_its_sum() -> None:
    finding = found("many-nodes", {"algo.max_context": 30000})["P706"]
    assert "4096 + 3 x (8192 + 1024) = 31744 tokens, the window has 30000" in finding.message


def test_every_field_that_bends_the_distribution_is_named() -> None:
    bent = {"algo.top_k": 20, "algo.min_p": 0.1, "algo.presence_penalty": 0.5}
    report = plan(data_of(Example("qwen3-4b", bent)))
    assert [each.path for each in report.findings if each.code == "P709"] == sorted(bent)
    assert "P709" not in found("qwen3-4b", {"algo.top_k": 0})


def test_routing_flips_matter_where_ratios_are_not_one() -> None:
    updates = {"algo.updates_per_batch": 4}
    assert "P719" not in found("qwen3-30b", {})
    assert "P719" not in found("qwen3-4b", updates)
    assert found("qwen3-30b", updates)["P719"].severity is Severity.WARNING
    assert "P719" not in found("qwen3-30b", {**updates, "algo.ratio_correction": "seq_mask"})
    replayed = {**updates, "algo.estimator": "gspo", "train.router_replay": "rollout"}
    assert found("qwen3-30b", replayed)["P719"].severity is Severity.NOTE


def test_a_reference_on_the_training_gpus_is_only_suggested_where_it_fits() -> None:
    finding = found("qwen3-4b", {"algo.kl_coef": 0.1})["P715"]
    assert finding.suggest == {"placement.reference": "shared"}
    case = case_of(data_of(Example("qwen3-4b")))[0]
    assert case is not None
    enough_without = int(case.worst_train_bytes) + 2**20
    tight = found("qwen3-4b", {"algo.kl_coef": 0.1, "hardware.gpu_mem_bytes": enough_without})["P715"]
    assert not tight.suggest
    assert "P715" not in found("laptop", {"algo.kl_coef": 0.1})


NOTHING_KNOWN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("two-nodes", {"hardware.gpu": "custom"}),
    ("two-nodes", {"placement.train_gpus": 0}),
    ("two-nodes", {"placement.rollout_gpus": 0, "rollout.pd": None}),
    ("two-nodes", {"rollout.engine": "openai", "rollout.pd": None}),
    ("qwen3-235b", {"train.last_stage_layers": 7, **DELTA}),
    ("laptop", {"workload.measured.decode_tok_s": None, **DELTA}),
    ("laptop", {"weights.transport": "gloo", "schedule.max_in_flight": 1}),
    ("laptop", {"algo.group_size": 1, "algo.groups_per_step": 1, "algo.updates_per_batch": 7}),
)


@pytest.mark.parametrize(("recipe", "changes"), NOTHING_KNOWN)
def test_rules_say_what_they_can_of_odd_inputs(recipe: str, changes: dict[str, Any]) -> None:
    data = data_of(Example(recipe, changes))
    assert plan(data) == plan(changed(data, {}))
