"""What a plan's scripts start `palestra train` with: its own file, without what a run does not know and nobody gave."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import check_config
from palestra.cli.planner.examples import changed, data_of
from palestra.cli.planner.export import export
from palestra.cli.planner.inputs import read
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.presets import MODELS
from palestra.cli.planner.types import Example, Severity
from tests.planexports import ALL, EXTERNAL, HALVES, exported, named, planned

ROOT = Path(__file__).resolve().parent.parent
STARTS = ("launch.sh", "slurm.sh", "rayjob.yaml", "compose.yaml")


def files_of(data: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Mapping[str, str]:
    case, *_ = case_of(data, model)
    assert case is not None
    return export(plan(data, model), case, source="")


@pytest.mark.parametrize(
    ("example", "model"),
    [
        ("calculator-smollm2", "smollm2-135m"),
        ("search-tiny", "tiny-qwen3-moe"),
        ("code-smollm2", "smollm2-135m"),
    ],
)
def test_a_run_on_a_cpu_is_the_same_run_after_its_export(example: str, model: str) -> None:
    given, dims = tomllib.loads((ROOT / f"examples/{example}.toml").read_text()), asdict(MODELS[model])
    form = tomllib.loads(files_of(given, dims)["train.toml"])
    run, before = check_config(form, "train.toml"), check_config(given, example)
    assert run.algo.max_context == run.rollout.context_len, "what was left out is what follows from the rest"
    told = run.algo.model_copy(update={"max_context": before.algo.max_context})
    assert run.model_copy(update={"algo": told}) == before
    again, first = plan(form, dims), plan(given, dims)
    assert (again.findings, again.quantities, again.not_built) == (first.findings, first.quantities, ())


@pytest.mark.parametrize("example", ALL, ids=named)
def test_whatever_starts_a_run_names_the_run_s_own_file(example: Example) -> None:
    for path, text in exported(example).items():
        if path in STARTS:
            assert re.search(r"\btrain[,\s]+\S*train\.toml\b", text), path
            assert "run.toml" not in text, path


@pytest.mark.parametrize("example", ALL, ids=named)
def test_no_field_that_a_run_does_not_know_is_said_by_the_plan_alone(example: Example) -> None:
    form = read(tomllib.loads(exported(example)["train.toml"]))
    given, _ = planned(example)
    # What only the planner knows a value of stays: another would be another plan.
    named_only = {each for each in form.not_built if " = " not in each}
    assert named_only <= set(given.not_built)
    assert form.findings == ()


def test_engines_that_stand_apart_are_named_by_their_addresses_only() -> None:
    """Two engines and their router on a CPU, with tables that are passed to whoever starts them."""
    tables = {
        "rollout.engine": "sglang",
        "rollout.engines": 2,
        "sglang.log_level": "info",
        "router.log_level": "warn",
        "env.id": "palestra/Calculator-v0",
        "model": {"path": "/m"},
    }
    files = files_of(data_of(Example("laptop", tables)), asdict(MODELS["tiny-qwen3-moe"]))
    form = tomllib.loads(files["train.toml"])
    assert form.keys().isdisjoint({"sglang", "router"})
    assert form["rollout"].keys().isdisjoint({"engines", "pd"})
    assert "--log-level info" in files["engines.sh"]
    addresses = {"rollout.urls": ["http://a:30000", "http://a:30001"], "rollout.router_url": "http://a:29900"}
    run = check_config(changed(form, addresses), "train.toml")
    assert (run.rollout.urls, run.rollout.router_url) == (addresses["rollout.urls"], addresses["rollout.router_url"])


@pytest.mark.parametrize(
    ("example", "engines"),
    [
        (Example("qwen3-4b"), 4),
        (Example("qwen3-4b", {"rollout.engines": 2}), 2),
        (Example("qwen3-4b", {"rollout.topology": "t.yaml", "rollout.gpus_per_engine": None}), None),
        (Example("laptop"), None),
        (Example("two-nodes"), None),
        (HALVES, None),
        (EXTERNAL, None),
    ],
)
def test_a_run_that_starts_its_engines_is_told_how_many_the_plan_counted(example: Example, engines: int | None) -> None:
    """Left out, a run starts one, and a plan counts as many as there are GPUs for; its own file stays open to other sizes."""
    files = exported(example)
    assert tomllib.loads(files["train.toml"])["rollout"].get("engines") == engines
    assert tomllib.loads(files["run.toml"])["rollout"].get("engines") == example.changes.get("rollout.engines")


def test_what_scripts_start_on_gpus_has_no_error() -> None:
    form = tomllib.loads(exported(HALVES)["train.toml"])
    given = changed(form, {"rollout.urls": ["http://b:30000", "http://b:30002"]})
    assert plan(given).of(Severity.ERROR) == ()


def test_addresses_that_both_tables_give_are_handed_over_once() -> None:
    one, other = "http://10.0.0.5:30000", "http://10.0.0.6:30001"
    both = Example(EXTERNAL.recipe, {**EXTERNAL.changes, "rollout.urls": [other]})
    assert f"--rollout.urls={json.dumps([other, one], separators=(',', ':'))}" in exported(both)["launch.sh"]


def test_fields_of_a_model_s_states_are_said_of_such_models_only() -> None:
    """SGLang would be passed their options for nothing."""
    assert not [key for key in tomllib.loads(exported(HALVES)["train.toml"])["rollout"] if key.startswith("state_")]
    assert tomllib.loads(exported(Example("qwen3-next"))["train.toml"])["rollout"]["state_strategy"] == "extra_buffer"
