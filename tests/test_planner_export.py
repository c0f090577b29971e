"""Exports of a plan hold what was planned: files are read back by what will read them, command lines have only options that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped, unused-ignore]

from palestra.cli.engines.commands import DEFAULTS
from palestra.cli.engines.environment import STANDINS
from palestra.cli.engines.options import argv_of
from palestra.cli.engines.topology import of_config, read_topology
from palestra.cli.engines.types import Topology
from palestra.cli.main import VERBS
from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import changed, data_of, text_of
from palestra.cli.planner.export import ASKED_FOR, NAMES, ExportError, export
from palestra.cli.planner.export.engines import FIND_ROUTER
from palestra.cli.planner.export.fleet import engine_section, fleet_of
from palestra.cli.planner.inputs import read
from palestra.cli.planner.plan import case_of, plan
from palestra.cli.planner.rules import registry
from palestra.cli.planner.types import Example, PlanReport, Severity
from tests.planexports import ALL, DATA, EXTERNAL, HALVES, LOADER, exported, loaded, named, planned


def passing() -> Iterator[Example]:
    """Every rule's passing example, each once."""
    seen = set()
    for rule in registry().values():
        key = repr(rule.passes)
        if key not in seen:
            seen.add(key)
            yield rule.passes


@pytest.mark.parametrize("example", ALL, ids=named)
def test_an_export_is_read_back_as_what_was_planned(example: Example, tmp_path: Path) -> None:
    """The configuration is planned to the same, the topology read to the same engines, and all scripts and YAML files can be read."""
    report, case = planned(example)
    assert_reads_back(exported(example), report, case, tmp_path)
    for path, text in exported(example).items():
        if path.endswith(".sh"):
            (tmp_path / path).write_text(text)
    parse_all(tmp_path)


@pytest.mark.walk
def test_what_any_rule_lets_pass_is_exported_and_read_back(tmp_path: Path) -> None:
    scripts: set[str] = set()
    for example in passing():
        report, case = planned(example)
        files = export(report, case, source="")
        assert_reads_back(files, report, case, tmp_path)
        scripts |= {text for path, text in files.items() if path.endswith(".sh")}
    for number, text in enumerate(sorted(scripts)):
        (tmp_path / f"{number}.sh").write_text(text)
    parse_all(tmp_path)


def assert_reads_back(files: Mapping[str, str], report: PlanReport, case: Case, folder: Path) -> None:
    """Everything but the scripts, by what reads it."""
    resolved = tomllib.loads(files["run.toml"])
    again = plan(resolved)
    assert read(resolved).input == read(report.resolved).input
    assert again.findings == report.findings
    assert again.resolved == report.resolved
    assert again.quantities == report.quantities
    for path, text in files.items():
        if path.endswith((".yaml", ".yml")):
            list(yaml.load_all(text, LOADER))
    if "sglang.yaml" in files:
        assert_same_engines(files, case, report, folder)


def parse_all(folder: Path) -> None:
    """Has bash read every script of a folder."""
    loop = 'for path in "$1"/*.sh; do bash -n "$path" || exit 1; done'
    read_by_bash = subprocess.run(["bash", "-c", loop, "bash", str(folder)], capture_output=True, text=True, timeout=60)
    assert read_by_bash.returncode == 0, read_by_bash.stderr


def assert_same_engines(files: Mapping[str, str], case: Case, report: PlanReport, folder: Path) -> None:
    """The topology file gives the engines of the plan, also under the options of the run's fields."""
    path = folder / "sglang.yaml"
    path.write_text(files["sglang.yaml"])
    wanted = fleet_of(case, report.resolved).topology
    assert without_env(read_topology(path, wanted.gpus_per_node)) == without_env(wanted)
    section = engine_section(case, report.resolved)
    named_file = section.model_copy(update={"pd": None, "engines": 1, "gpus_per_engine": 1, "topology": str(path)})
    assert of_config(named_file, wanted.gpus_per_node) == wanted


def without_env(topology: Topology) -> Topology:
    """Variables come from `[rollout]`, not from a topology file."""
    return replace(topology, groups=tuple(replace(group, env={}) for group in topology.groups))


@pytest.mark.walk
def test_plans_with_errors_are_exported_by_force_only_and_say_so() -> None:
    """Every rule's failing example that could be read at all."""
    for code, rule in registry().items():
        if rule.severity is not Severity.ERROR:
            continue
        data = data_of(rule.fails)
        report, (case, *_) = plan(data), case_of(data)
        if not report.of(Severity.ERROR):
            # A rule may find that an example is only worth a warning.
            assert case is not None
            assert export(report, case, source="", only={"config"})
            continue
        with pytest.raises(ExportError, match=code):
            export(report, case, source="")
        if case is None:
            with pytest.raises(ExportError, match="could not be read"):
                export(report, case, source="", force=True)
            continue
        files = export(report, case, source="", force=True)
        assert all(code in text for path, text in files.items() if path != "plan.schema.json"), rule.fails


@pytest.mark.parametrize("example", [Example("laptop"), Example("two-nodes"), EXTERNAL], ids=named)
def test_an_export_is_the_same_each_time(example: Example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the machine, the present folder or the environment is another."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PALESTRA_ENGINE_ENV", "TZ"):
        monkeypatch.setenv(name, "7")
    report, case = planned(example)
    assert export(report, case, source=text_of(example.recipe)) == exported(example)


@pytest.mark.parametrize("example", ALL, ids=named)
def test_engines_have_only_options_that_exist(example: Example) -> None:
    known = set((DATA / "flags-sglang-0.5.23.txt").read_text().split())
    # Real engines are started with these by the tests that install SGLang; the wheel's tables leave one of them out.
    known |= set(argv_of(DEFAULTS["cpu"]))
    for path in ("engines.sh", "serving-reference.sh"):
        for line in exported(example).get(path, "").splitlines():
            if "sglang.launch_server" in line:
                asked = {word for word in shlex.split(line) if word.startswith("--")}
                assert asked - known == set(), line
                assert {"--model-path", "--host", "--port", "--context-length", "--enable-metrics"} <= asked
    for group in loaded(exported(example).get("sglang.yaml", "models: [{groups: []}]"))["models"][0]["groups"]:
        assert {"--" + name.replace("_", "-") for name in group["overrides"]} - known == set()


@pytest.mark.parametrize("example", ALL, ids=named)
def test_compose_files_and_ray_jobs_are_of_their_form(example: Example) -> None:
    files = exported(example)
    document = loaded(files["compose.yaml"])
    held_to("compose.schema.json", document)
    services = document["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
    named_there = set(re.findall(r"(?<!\$)\$\{([A-Z0-9_]+):\?", files["compose.yaml"]))
    assert named_there <= set(re.findall(r"^([A-Z0-9_]+)=", files[".env.example"], re.MULTILINE))
    if "rayjob.yaml" in files:
        held_to("rayjob.schema.json", loaded(files["rayjob.yaml"]))


def held_to(schema: str, document: Any) -> None:
    jsonschema.validate(document, json.loads((DATA / schema).read_text()), jsonschema.Draft202012Validator)


def test_a_misspelt_field_of_a_manifest_would_be_seen() -> None:
    files = exported(Example("two-nodes"))
    compose_file = loaded(files["compose.yaml"])
    compose_file["services"]["train"]["comand"] = []
    job = loaded(files["rayjob.yaml"])
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    for schema, document in (("compose.schema.json", compose_file), ("rayjob.schema.json", job)):
        with pytest.raises(jsonschema.ValidationError):
            held_to(schema, document)


@pytest.mark.parametrize("example", ALL, ids=named)
def test_manifests_ask_for_the_gpus_of_the_plan(example: Example) -> None:
    files, (_, case) = exported(example), planned(example)
    if case.on_cpu:
        assert "rayjob.yaml" not in files
        assert "gpus" not in files["slurm.sh"]
        return
    wanted = max(case.train_gpus, case.rollout_gpus) if case.colocated else case.train_gpus + case.rollout_gpus
    pods = [(group["replicas"], group["template"]) for group in spec_of(files)["rayClusterSpec"]["workerGroupSpecs"]]
    if "engines.k8s.yaml" in files:
        _, engines = yaml.load_all(files["engines.k8s.yaml"], LOADER)
        pods.append((engines["spec"]["replicas"], engines["spec"]["template"]))
    asked = [int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) * many for many, pod in pods]
    assert sum(asked) == wanted
    per_node = re.search(r"--gpus-per-node=(\d+)", files["slurm.sh"])
    nodes = re.search(r"--nodes=(\d+)", files["slurm.sh"])
    assert per_node
    assert nodes
    assert int(per_node[1]) * int(nodes[1]) == wanted
    assert f">= {wanted}))" in files["launch.sh"]


def spec_of(files: Mapping[str, str]) -> Mapping[str, Any]:
    job: Mapping[str, Any] = loaded(files["rayjob.yaml"])["spec"]
    return job


def test_engines_that_span_machines_have_a_line_for_each() -> None:
    """235B: two engines of 32 GPUs on eight machines of eight."""
    lines = [line for line in exported(Example("qwen3-235b"))["engines.sh"].splitlines() if line.startswith("start ")]
    engines = [shlex.split(line) for line in lines if "router" not in line.split()[2]]
    assert [words[1] for words in engines] == [str(node) for node in range(8)]
    assert [value_of(words, "--node-rank") for words in engines] == ["0", "1", "2", "3"] * 2
    assert {value_of(words, "--nnodes") for words in engines} == {"4"}
    assert [value_of(words, "--dist-init-addr") for words in engines] == ["${NODE_0}:30001"] * 4 + [
        "${NODE_4}:30003"
    ] * 4
    assert [value_of(words, "--host") for words in engines] == [f"${{NODE_{node}}}" for node in range(8)]
    assert {(value_of(words, "--tp-size"), value_of(words, "--attn-dp-size")) for words in engines} == {("32", "4")}


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_prefill_and_decode_engines_and_their_router() -> None:
    """One prefill and three decode engines of two GPUs, on the second of two machines."""
    files = exported(Example("two-nodes"))
    starts = [shlex.split(line) for line in files["engines.sh"].splitlines() if line.strip().startswith("start ")]
    engines, router = starts[:-1], starts[-1]
    assert [(words[2], words[3]) for words in engines] == [(f"engine-{n}", f"{2 * n},{2 * n + 1}") for n in range(4)]
    assert [value_of(words, "--disaggregation-mode") for words in engines] == ["prefill", *["decode"] * 3]
    told = json.loads(router[-1])
    assert told["pd_disaggregation"]
    assert told["prefill_urls"] == [["http://${NODE_0}:30000", 30001]]
    assert len(told["decode_urls"]) == 3
    assert told["disable_retries"]
    assert told["policy"] == "consistent_hashing"
    assert "NODE_0=${nodes[1]}" in files["launch.sh"]
    # A run takes rollout.urls or rollout.pd: what the scripts start it with has no error either.
    assert "palestra train train.toml" in files["launch.sh"]
    given = changed(tomllib.loads(files["train.toml"]), {"rollout.urls": ["http://b:30000", "http://b:30002"]})
    assert "pd" not in given["rollout"]
    assert plan(given).of(Severity.ERROR) == ()


def test_halves_of_one_machine_do_not_meet() -> None:
    """Four GPUs for two engines, four for training."""
    services = loaded(exported(HALVES)["compose.yaml"])["services"]
    held = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert held == {"engine-0": ["0", "1"], "engine-1": ["2", "3"], "train": ["4", "5", "6", "7"]}
    assert "http://127.0.0.1:29900" in " ".join(services["train"]["command"])
    assert not any("model.path" in word for word in services["train"]["command"])
    assert services["router"]["depends_on"].keys() == {"engine-0", "engine-1"}


def test_engines_of_others_get_a_reference_instead_of_a_script() -> None:
    files = exported(EXTERNAL)
    assert "engines.sh" not in files
    text = files["serving-reference.sh"]
    assert "--host 10.0.0.6 --port 30001" in text
    assert "urls=(http://10.0.0.5:30000 http://10.0.0.6:30001)" in text
    assert "engines.sh" in files["PLAN.md"].partition("has not")[2]
    assert "--rollout.urls=" in files["launch.sh"]


def test_slimes_dialect_says_the_same(tmp_path: Path) -> None:
    report, case = planned(Example("two-nodes"))
    both = export(report, case, source="", only={"sglang", "slime-sglang"})
    assert both.keys() == {"sglang.yaml", "sglang.slime.yaml"}
    read_back = []
    for path, text in both.items():
        (tmp_path / path).write_text(text)
        read_back.append(read_topology(tmp_path / path))
    assert read_back[0] == read_back[1]
    assert loaded(both["sglang.slime.yaml"])["sglang"][0]["server_groups"][0]["worker_type"] == "prefill"


def test_only_what_was_asked_for_is_made() -> None:
    report, case = planned(Example("laptop"))
    assert export(report, case, source="", only={"launch", "compose"}).keys() == {
        "launch.sh",
        "compose.yaml",
        ".env.example",
    }
    with pytest.raises(ExportError, match="nothing is called lunch"):
        export(report, case, source="", only={"lunch"})
    with pytest.raises(ExportError, match=r"engines\.sh: rollout\.engine is embedded"):
        export(report, case, source="", only={"engines"})
    listed = {path for paths in NAMES.values() for path in paths}
    made = {path for example in ALL for path in exported(example)}
    assert made == listed - {path for name in ASKED_FOR for path in NAMES[name]}


@pytest.mark.parametrize("example", ALL, ids=named)
def test_reports_are_of_the_published_form(example: Example) -> None:
    files = exported(example)
    schema = json.loads(files["plan.schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(files["plan.json"]), schema, jsonschema.Draft202012Validator)


def test_commands_that_scripts_name_exist() -> None:
    for example in ALL:
        for path, text in exported(example).items():
            if path.endswith((".sh", ".yaml")):
                for verb, word in re.findall(r"palestra (\w+)(?: (\w+))?", text):
                    if verb in VERBS:
                        verbs = getattr(import_module(f"palestra.cli.{verb}"), "VERBS", {})
                        assert not verbs or word in verbs, f"{path}: palestra {verb} {word}"
    found: dict[str, Any] = {"print": lambda path: found.update(path=path)}
    exec(FIND_ROUTER, found)
    assert found["path"] == STANDINS / "router_main.py"
    assert found["path"].is_file()


def test_deterministic_training_is_told_so_and_engines_are_not() -> None:
    files = exported(Example("qwen3-4b", {"train.deterministic": True, "rollout.attention_backend": "fa3"}))
    for path in ("launch.sh", "slurm.sh", "rayjob.yaml", "compose.yaml"):
        assert "CUBLAS_WORKSPACE_CONFIG" in files[path], path
    assert "CUBLAS_WORKSPACE_CONFIG" not in files["engines.sh"]
    assert "--enable-deterministic-inference" in files["engines.sh"]
