"""Rules of a plan about placement and engines, and a run: what starts engines refuses the same, and what is not known is not judged."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import ConfigError, check_config
from palestra.cli.engines.topology import of_config
from palestra.cli.engines.types import EngineSetupError
from palestra.cli.planner.examples import OURS, PUBLIC, changed, data_of
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.rules.engine_words import sizes
from palestra.cli.planner.types import Example, Severity
from palestra.server.config import EngineSection
from tests.enginecases import found, only

ROOT = Path(__file__).resolve().parent.parent
RUN: dict[str, Any] = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}}


@pytest.mark.parametrize(
    ("rollout", "code"),
    [
        ({"pd": {"prefill_gpus": 3, "decode_gpus": 2, "prefill_gpus_per_engine": 2}}, "P408"),
        ({"pd": {"prefill_gpus": 1, "decode_gpus": 1}, "urls": ["http://a"]}, "P409"),
        ({"topology": "t.yaml", "engines": 2}, "P409"),
        ({"routed_experts": True, "engines": 2}, "P422"),
        ({"engine": "embedded", "hicache": True}, "P428"),
        ({"threads": 3}, "P428"),
        ({"router": "none", "engines": 2}, "P433"),
    ],
)
def test_a_run_s_section_refuses_with_the_words_of_the_plan(rollout: dict[str, Any], code: str) -> None:
    tables = {"rollout": {"engine": "sglang", **rollout}}
    said = [each for each in plan({**tables, "model": {"preset": "qwen3-4b"}}).findings if each.code == code]
    assert said
    assert said[0].severity is Severity.ERROR
    with pytest.raises(ConfigError) as refused:
        check_config({**RUN, **tables}, "run.toml")
    assert any(each.message in str(refused.value) for each in said)


@pytest.mark.parametrize(
    ("rollout", "code"),
    [
        ({"gpus_per_engine": 12}, "P312"),
        ({"gpus_per_engine": 4, "ep": 3}, "P405"),
        ({"dp": 2}, "P407"),
        ({"gpus_per_engine": 4, "dp": 3, "dp_attention": True}, "P407"),
        ({"pd": {"prefill_gpus": 2, "decode_gpus": 2}, "gpus_per_engine": 2}, "P409"),
        ({"deterministic": True, "attention_backend": "flashmla"}, "P426"),
        ({"hicache": True, "prefix_cache": False}, "P434"),
        ({"state_ratio": 0.5, "state_slots_pin": 3}, "P435"),
    ],
)
def test_whoever_starts_engines_refuses_with_the_words_of_the_plan(rollout: dict[str, Any], code: str) -> None:
    section = {"engine": "sglang", **rollout}
    of, *_ = case_of({"rollout": section, "model": {"preset": "glm-4.5-air"}})
    assert of is not None
    said = only(of, code)
    assert said
    with pytest.raises(EngineSetupError) as refused:
        of_config(EngineSection(**section))
    shared = ("does not divide",) if code == "P405" else tuple(each.message for each in said)
    assert any(message in str(refused.value) for message in shared)


def test_a_size_beside_prefill_and_decode_that_says_the_same_is_none_too_many() -> None:
    pd = {"prefill_gpus": 2, "prefill_gpus_per_engine": 2, "decode_gpus": 6, "decode_gpus_per_engine": 2}
    groups = of_config(EngineSection(engine="sglang", gpus_per_engine=2, pd=pd)).groups
    assert [(group.kind, group.engines, group.gpus_per_engine) for group in groups] == [
        ("prefill", 1, 2),
        ("decode", 3, 2),
    ]


# What is never said


@pytest.mark.parametrize(
    ("example", "model"),
    [
        ("calculator-smollm2", "smollm2-135m"),
        ("search-tiny", "tiny-qwen3-moe"),
        ("code-smollm2", "smollm2-135m"),
    ],
)
def test_examples_that_describe_no_machine_are_left_in_peace(example: str, model: str) -> None:
    tables = tomllib.loads((ROOT / f"examples/{example}.toml").read_text())
    of, *_ = case_of(tables, asdict(MODELS[model]))
    assert of is not None
    assert found(of) == []


def test_engines_on_gpus_that_the_file_does_not_describe_are_held_to_their_sizes_only() -> None:
    """A run need not say which GPUs it has: what rests on them is not known."""
    rollout = {"engine": "sglang", "engines": 2, "gpus_per_engine": 4, "ep": 4}
    of, *_ = case_of({"rollout": rollout, "model": {"preset": "qwen3-30b-a3b"}, "weights": {"transport": "disk"}})
    assert of is not None
    assert found(of) == []
    assert sizes(of) == (("rollout.gpus_per_engine", 4),)


ODD: list[dict[str, Any]] = [
    {"placement.train_gpus": 0, "placement.rollout_gpus": 0},
    {"placement.mode": "external", "placement.external_urls": ["http://a"]},
    {"rollout.engine": "openai"},
    {"rollout.engine": "embedded"},
    {"hardware.gpu": "custom"},
    {"hardware.gpu": "cpu", "placement.mode": None},
    {"rollout.gpus_per_engine": 64, "rollout.dp": 7, "rollout.dp_attention": True, "rollout.ep": 5},
    {"rollout.pd": {"prefill_gpus": 1, "decode_gpus": 1, "decode_gpus_per_engine": 2}, "rollout.hicache": True},
    {"rollout.hicache": True, "rollout.hicache_ratio": 1e6, "rollout.deterministic": True},
    {"algo.group_size": 1, "algo.groups_per_step": 1, "schedule.max_in_flight": 1},
    {"hardware.nodes": 1, "hardware.gpus_per_node": 1},
    {"rollout.mem_fraction": 0.1, "rollout.weight_dtype": "fp32", "rollout.state_slots_pin": 1},
    {"workload": None},
]


@pytest.mark.parametrize("recipe", [*PUBLIC, *OURS])
def test_no_rule_raises_on_what_can_be_given(recipe: str) -> None:
    for changes in ODD:
        of, *_ = case_of(changed(data_of(Example(recipe)), changes))
        if of is not None:
            for finding in found(of):
                assert finding.message, finding
                assert all(path.count(".") in (1, 2) for path in finding.suggest), finding
