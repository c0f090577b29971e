"""The configuration of runs: every wrong input has one clear line, and no field is without effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from palestra.cli.config import (
    AnyConfig,
    ConfigError,
    RunConfig,
    ServeConfig,
    check_as,
    check_config,
    dump_toml,
    kind_of,
    load_as,
    load_config,
)
from palestra.envs.config import Section

ROOT = Path(__file__).resolve().parent.parent
MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optim": {"learning_rate": 1}}, "unknown field optim.learning_rate"),
        ({"algo": {"groupsize": 4}}, "did you mean group_size?"),
        ({"algoo": {}}, "did you mean algo?"),
        ({"train": {"tp": 2}}, "not built: train.tp"),
        ({"rollout": {"draft_tokens": 2}}, "not built: rollout.draft_tokens"),
        ({"rollout": {"engine": "sglang", "pd": {}}}, "rollout.pd.prefill_gpus must be given"),
        (
            {
                "rollout": {
                    "engine": "sglang",
                    "pd": {"prefill_gpus": 3, "decode_gpus": 2, "prefill_gpus_per_engine": 2},
                }
            },
            "no multiple",
        ),
        ({"rollout": {"engine": "sglang", "weight_dtype": "int4"}}, "not built: rollout.weight_dtype = 'int4'"),
        ({"rollout": {"engines": 2}}, 'rollout.engines needs rollout.engine = "sglang"'),
        ({"rollout": {"engine": "sglang", "threads": 3}}, 'rollout.threads needs rollout.engine = "embedded"'),
        ({"rollout": {"engine": "sglang", "topology": "t.yaml", "engines": 2}}, "rollout.engines and rollout.topology"),
        ({"rollout": {"engine": "sglang", "router_url": "http://r"}}, "rollout.urls must name them"),
        ({"rollout": {"engine": "sglang", "engines": 2, "router": "none"}}, "is for one engine"),
        (
            {"rollout": {"engine": "sglang", "engines": 2, "routed_experts": True}},
            "sglang-router drops return_routed_experts",
        ),
        ({"train": {"backend": "fsdp"}, "megatron": {"x": 1}}, r'\[megatron\] needs train.backend = "megatron"'),
        ({"sglang": {"x": 1}}, "it needs rollout.engine = .sglang."),
        ({"router": {"x": 1}, "rollout": {"engine": "sglang"}}, "in front of several SGLang engines"),
        ({"weights": {"mode": "delta"}}, "rollout.urls and rollout.agents must name them"),
        (
            {"weights": {"mode": "delta"}, "rollout": {"engine": "sglang", "urls": ["http://e"]}},
            "rollout.agents has none for http://e",
        ),
        ({"schedule": {"kind": "async", "max_staleness": 1, "publish_every": 4}}, "less than the 3 train steps"),
        ({"algo": {"estimator": "ppo"}}, "not built: algo.estimator"),
        ({"algo": {"group_size": 0}}, "algo.group_size.*greater than or equal to 1.*got 0"),
        ({"schedule": {"kind": "async"}}, "schedule.max_staleness must be given"),
        ({"schedule": {"max_staleness": 3}}, "this synchronous run carries nothing over"),
        ({"schedule": {"kind": "one_step_off", "max_staleness": 3}}, "schedule.max_staleness follows from"),
        ({"schedule": {"partial": "resume"}}, "needs schedule.generation_budget_s or generation_budget_tokens"),
        ({"schedule": {"partial": "resume", "generation_budget_s": 5}}, "needs schedule.max_staleness of at least 1"),
        ({"schedule": {"generation_budget_tokens": 5}}, 'needs schedule.partial = "resume"'),
        ({"schedule": {"partial_old_tokens": "mask"}}, 'partial_old_tokens needs schedule.partial = "resume"'),
        ({"schedule": {"kind": "one_step_off", "colocated": True}}, 'schedule.colocated needs schedule.kind = "sync"'),
        ({"algo": {"oversample": 2}}, "algo.oversample needs schedule.max_staleness of at least 1"),
        (
            {"algo": {"oversample": 2}, "schedule": {"kind": "one_step_off"}},
            "the staleness bound says what is under way",
        ),
        ({"algo": {"group_size": 2, "min_group": 3}}, "no group would be trained"),
        ({"rollout": {"plan": "a:B", "function": "a:b"}}, "both say how rollouts are made"),
        ({"buffer": {"url": "mysql://x"}}, "buffer.url"),
        ({"buffer": {"keep_bytes": 5}}, "buffer.keep_bytes shortens buffer.keep_hours, which is 0"),
        ({"agent": {"kind": "python", "entry": "a:b"}, "eval": {"top_p": 0.5}}, 'eval.top_p needs agent.kind = "chat"'),
        ({"eval": {"max_response": 9999}}, "eval.max_response leaves no room"),
        ({"schedule": {"deadline_s": float("inf")}}, "schedule.deadline_s"),
        ({"agent": {"kind": "command"}}, "agent.command must be given"),
        ({"run": {"name": "../x"}}, "run.name"),
        ({"sandbox": {"boxs": 2}}, "unknown field sandbox.boxs; did you mean boxes"),
        ({"sandbox": {"network": "all"}}, "not built: sandbox.network"),
        ({"sandbox": {"backend": "unsafe_subprocess"}}, "sandbox.i_understand = true"),
    ],
)
def test_wrong_configurations_say_what_is_wrong(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config({**MINIMAL, **tables}, "run.toml")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config({"env": {"id": "x", "idd": 1}, "optim": {"lr": -1}}, "run.toml")
    assert len(str(caught.value).splitlines()) == 3


def test_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml: cannot be read"):
        load_config(tmp_path / "nope.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 1"):
        load_config(broken)


def test_overrides_and_the_resolved_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[env]\nid = "e"\nargs = { levels = [1, 2], prompt = "plain" }\n')
    config = load_config(path, ["--optim.lr=2e-5", "--model.path=other", "--run.steps=3", "--optim.betas=[0.8, 0.9]"])
    assert (config.optim.lr, config.model.path, config.run.steps, config.optim.betas) == (2e-5, "other", 3, (0.8, 0.9))
    path.write_text(dump_toml(config))
    assert load_config(path) == config


def test_a_run_s_sandbox_round_trips_and_a_service_has_none(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    given = {"backend": "landlock", "boxes": 3, "mounts": {"/data": "/srv/data"}, "preload": ["numpy"], "warm": 0}
    config = check_config({**MINIMAL, "sandbox": given}, "x")
    path.write_text(dump_toml(config))
    assert load_config(path) == config
    assert (config.sandbox.boxes, config.sandbox.mounts) == (3, {"/data": "/srv/data"})
    assert load_config(path, ["--sandbox.boxes=5"]).sandbox.boxes == 5
    with pytest.raises(ConfigError, match=r"not built: .*sandbox"):
        check_as(ServeConfig, {"model": MINIMAL["model"], "sandbox": given}, "x")


def test_a_service_s_resolved_file_round_trips_and_needs_no_file_at_first(tmp_path: Path) -> None:
    given = ["--model.path=m", "--serve.port=8000", "--serve.sampling=free", "--serve.temperature=0"]
    config = load_as(ServeConfig, None, given)
    assert (config.serve.port, config.serve.temperature, config.run.name) == (8000, 0.0, "serve")
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(config))
    assert load_as(ServeConfig, path) == config
    with pytest.raises(ConfigError, match=r"arguments: model must be given"):
        load_as(ServeConfig, None, [])


def test_a_folder_says_which_kind_of_run_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is here"):
        kind_of(tmp_path)
    for said, kind in (('{"model_folder": "m"}', "train"), ('{"kind": "serve"}', "serve")):
        (tmp_path / "meta.json").write_text(said)
        assert kind_of(tmp_path) == kind
    (tmp_path / "meta.json").write_text('{"kind": "fly"}')
    with pytest.raises(ConfigError, match="kind 'fly'; known: train, serve"):
        kind_of(tmp_path)


@pytest.mark.parametrize("override", ["--lr=1", "--optim.lr", "--model.path.x=1"])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(check_config(MINIMAL, "x")))
    with pytest.raises(ConfigError):
        load_config(path, [override])


FORMS: tuple[type[AnyConfig], ...] = (RunConfig, ServeConfig)


def sections(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], str, FieldInfo]]:
    """(path, section, name, field) of every leaf of the configuration."""
    for name, field in model.model_fields.items():
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if inner is None:
            yield f"{prefix}{name}", model, name, field
        else:
            yield from sections(inner, f"{name}.")


def consumed_names() -> set[str]:
    """Every attribute that some module reads, the modules that declare configuration aside."""
    names: set[str] = set()
    for folder in ("envs", "agents", "server", "trainer", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "config.py" and folder != "cli":
                continue
            tree = ast.parse(path.read_text())
            reads = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
            names |= {node.attr for node in reads}
    return names


# Read inside their own section, by a property or validator of the name that is given.
READ_INSIDE = {
    "schedule.kind": "staleness",
    "schedule.max_staleness": "staleness",
    "schedule.publish_every": "publish_steps",
    "algo.max_turns": "limits",
    "algo.episode_deadline_s": "limits",
    "algo.temperature": "sampling",
    "algo.max_response": "sampling",
    "algo.ratio_correction": "correction",
}
# One value only: every other is refused by name, so there is nothing to consume.
SINGLE = {
    "optim.schedule",
    "version",
    "sandbox.network",
    "sandbox.per_episode",
    "sandbox.fresh_grader",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_field_has_a_consumer_or_a_refusal(form: type[AnyConfig]) -> None:
    consumed = consumed_names()
    idle = [
        path
        for path, _, name, _ in sections(form)
        if path not in SINGLE and READ_INSIDE.get(path, name) not in consumed
    ]
    assert idle == []


@pytest.mark.parametrize("path", sorted(SINGLE))
def test_fields_of_one_value_refuse_every_other(path: str) -> None:
    table, _, name = path.rpartition(".")
    values: dict[str, Any] = {table: {name: "something else"}} if table else {name: 7}
    with pytest.raises(ConfigError):
        check_config({**MINIMAL, **values}, "x")
    if not table or table in ServeConfig.model_fields:
        with pytest.raises(ConfigError):
            check_as(ServeConfig, {"model": MINIMAL["model"], **values}, "x")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_built_is_not_also_a_field(form: type[AnyConfig]) -> None:
    seen = {section for _, section, _, _ in sections(form)} | {form}
    for section in seen:
        assert not section.not_built & section.model_fields.keys(), section
