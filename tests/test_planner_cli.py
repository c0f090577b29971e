"""The verb `palestra plan`: reports, sweeps, comparisons, explanations, exports and exit statuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.main import VERBS
from palestra.cli.plan import main
from palestra.cli.planner.compare import compare
from palestra.cli.planner.examples import OURS, PUBLIC, data_of, text_of
from palestra.cli.planner.explain import docs_of, explain, fields
from palestra.cli.planner.plan import plan
from palestra.cli.planner.rules import registry
from palestra.cli.planner.sections import PlanHardware
from palestra.cli.planner.sweep import MOST_ROWS, sweep
from palestra.cli.planner.text import amount, bar, settings, written
from palestra.cli.planner.types import Example
from palestra.cli.plans.writing import write_files

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "attention_bias": False,
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text_of("qwen3-4b"))
    return path


def told(capsys: pytest.CaptureFixture[str], *argv: str | Path, status: int = 0) -> str:
    found = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert found == status, out + err
    return out + err


def test_the_verb_is_known() -> None:
    assert "plan" in VERBS


@pytest.mark.parametrize("recipe", [*OURS, *PUBLIC])
def test_every_recipe_is_reported(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "--recipe", recipe)
    assert out.startswith(f"plan of recipe {recipe}: ")
    assert "0 errors" in out
    assert max(map(len, out.splitlines())) < 200


def test_errors_make_status_1_and_show_what_to_do(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, run_file, "--train.tensor_parallel=2", status=1)
    assert "\nerrors\n  P001  train.tensor_parallel\n    unknown field train.tensor_parallel" in out
    assert "1 error," in out


def test_strict_counts_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    warned = next(rule for rule in registry().values() if rule.severity == "warning")
    words = [f"--{path}={written(value)}" for path, value in warned.fails.changes.items() if value is not None]
    if None in warned.fails.changes.values():
        pytest.skip("this example takes fields away")
    assert warned.code in told(capsys, "--recipe", warned.fails.recipe, *words)
    told(capsys, "--recipe", warned.fails.recipe, *words, "--strict", status=1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["missing.toml"], "cannot be read"),
        (["--recipe", "nobody"], "no recipe nobody; known: "),
        (["--recipe", "laptop", "--train=3"], "overrides look like"),
        (["--recipe", "laptop", "--sweep", "tp=1,2"], "write table.key=A,B,C"),
        (["--recipe", "laptop", "--sweep", "train.tp=1,,2"], "a value is empty"),
        (["--recipe", "laptop", "--sweep", "train.tp=1, "], "a value is empty"),
        (["--recipe", "laptop", "--sweep", "train.tp=1", "--sweep", "train.tp=2"], "train.tp is given twice"),
        (["--recipe", "laptop", "--sweep", "model.path=a,b"], "sweep model.preset"),
        (["--recipe", "laptop", "--explain", "P2033"], "near: "),
        (["--explain", "time.sync_s"], "numbers of a plan need CONFIG or --recipe"),
        (["--recipe", "laptop", "--compare", "nobody"], "no recipe nobody"),
        (["--recipe", "qwen3-4b", "--model.preset=hf"], "needs --model-config"),
        (["--recipe", "qwen3-4b", "--model-config", "nowhere/config.json"], "given twice"),
    ],
)
def test_what_cannot_be_read_is_status_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in told(capsys, *argv, status=2)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["run.toml", "--recipe", "laptop"],
        ["run.toml", "--train.tp", "2"],
        ["run.toml", "--force"],
        ["run.toml", "--sweep", "train.tp=1", "--compare", "laptop"],
        ["run.toml", "--json", "--explain", "P001"],
        ["run.toml", "--toml"],
        ["--recipe", "laptop", "--toml", "--train.tp=2"],
        ["--recipe", "laptop", "--toml", "--json"],
        ["--recipe", "laptop", "--toml", "--strict"],
        ["--recipe", "laptop", "--toml", "--model-config", "config.json"],
        ["--recipe", "laptop", "--list"],
        ["--list", "--train.tp=2"],
        ["--list", "--rules-page"],
        ["--list", "--json"],
        ["--rules-page", "--strict"],
        ["--explain", "P001", "--strict"],
        ["--explain", "P001", "--train.tp=2"],
        ["--explain", "P001", "--model-config", "config.json"],
        ["run.toml", "--sweep", "train.tp=1", "--strict"],
        ["run.toml", "--export", "folder", "--json"],
    ],
)
def test_words_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "palestra plan: error: " in capsys.readouterr().err


def test_a_file_that_is_no_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model\n")
    assert "not valid TOML" in told(capsys, path, status=2)


def test_json_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, "--recipe", "two-nodes", "--json"))
    assert list(found) == ["findings", "quantities", "advice", "not_built", "resolved", "derived"]
    report = plan(data_of(Example("two-nodes")))
    assert [each["code"] for each in found["findings"]] == [each.code for each in report.findings]
    assert {each["id"]: each["value"] for each in found["quantities"]} == {e.id: e.value for e in report.quantities}
    assert found["resolved"]["train"]["ep"] == 8


def test_toml_prints_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "--recipe", "laptop", "--toml") == text_of("laptop")


def test_list_names_presets_gpus_and_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "--list")
    assert all(name in out for name in ("deepseek-v3", "h200-141", "many-nodes"))


# The model's dimensions.


def without_preset(run_file: Path, model: str) -> None:
    run_file.write_text(run_file.read_text().replace('preset = "qwen3-4b"', model))


def test_dimensions_come_from_a_config_that_is_named(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "qwen.json"
    config.write_text(json.dumps(QWEN3))
    without_preset(run_file, 'preset = "hf"')
    json.loads(told(capsys, run_file, "--model-config", config, "--json"))
    assert "P004" in told(capsys, run_file, "--model-config", config, "--model.layers=3", status=1)


def test_dimensions_come_from_the_models_folder(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    without_preset(run_file, f'path = "{tmp_path / "model"}"')
    assert "P004" in told(capsys, run_file, "--model.layers=3", status=1)
    told(capsys, run_file, "--model.layers=36")


def test_a_packaged_model_is_the_preset_of_its_name(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_preset(run_file, 'path = "smollm2-135m"')
    assert "model.layers = 3 but" in told(capsys, run_file, "--model.layers=3", status=1)


def test_a_model_that_nobody_can_read_needs_its_dimensions(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    without_preset(run_file, f'path = "{tmp_path}"')
    out = told(capsys, run_file, status=1)
    assert "P005" in out
    assert "unheard_of" in out
    without_preset(run_file, 'path = "someone/Unknown-7B"')
    told(capsys, run_file, "--model-config", tmp_path / "config.json", status=2)
    (tmp_path / "config.json").write_text("[]")
    told(capsys, run_file, "--model-config", tmp_path / "config.json", status=2)


# Tables that are passed on.


def test_names_that_megatron_core_does_not_have_are_unknown(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, run_file, "--megatron.recompute_granularty=full", status=1)
    assert "P001  megatron.recompute_granularty" in out
    assert "did you mean recompute_granularity?" in out
    told(capsys, run_file, "--megatron.recompute_granularity=full")


def test_a_sweep_looks_at_tables_that_are_passed_on_row_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "laptop", "--megatron.recompute_granularity=full", "--sweep", "train.backend=megatron,fsdp"]
    rows = json.loads(told(capsys, *words, "--json"))
    assert {row["values"]["train.backend"]: row["errors"] for row in rows} == {"megatron": [], "fsdp": ["P002"]}


# Sweeps.


def test_a_sweep_lists_the_quickest_first_and_the_refused_last(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "qwen3-30b", "--sweep", "train.tp=[2,4,0]", "--sweep", "train.max_tokens_per_gpu=10240,20480"]
    rows = json.loads(told(capsys, *words, "--json"))
    assert len(rows) == 6
    refused = [bool(row["errors"]) for row in rows]
    assert refused == sorted(refused)
    assert [row["errors"] for row in rows if row["values"]["train.tp"] == 0] == [["P002"], ["P002"]]
    times = [row["sync_s"] for row in rows if not row["errors"]]
    assert times == sorted(times)
    lines = told(capsys, *words).splitlines()
    assert lines[0].split()[:4] == ["train.tp", "train.max_tokens_per_gpu", "train", "GPU"]
    assert lines[-1].endswith("P002")


def test_a_sweep_of_nothing_that_works_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "--recipe", "laptop", "--sweep", "train.tp=0,-1", status=1)


def test_a_sweep_row_says_what_the_plan_of_that_row_says() -> None:
    data = data_of(Example("two-nodes"))
    (row,) = sweep(data, {"train.tp": [4]})
    numbers = {each.id: each.value for each in plan(data).quantities}
    assert row.errors == ()
    assert row.sync_s == numbers["time.sync_s"]
    assert row.async_s == numbers["time.async_s"]
    assert row.gpu_bytes == numbers["train.gpu_bytes"]
    assert row.kv_tokens == numbers["engine.kv_tokens"]
    assert row.speedup == pytest.approx(numbers["time.speedup"])
    assert row.step_s == row.async_s


def test_words_of_a_sweep_may_be_texts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(told(capsys, "--recipe", "qwen3-4b", "--sweep", "train.recompute=full,none", "--json"))
    assert {row["values"]["train.recompute"] for row in rows} == {"full", "none"}


@pytest.mark.walk
def test_a_thousand_rows_take_less_than_two_seconds_of_cpu() -> None:
    axes: dict[str, list[Any]] = {
        "train.tp": [1, 2, 4, 8],
        "train.max_tokens_per_gpu": list(range(8192, 8192 + 25 * 512, 512)),
        "algo.groups_per_step": [8, 16, 32, 64, 128],
        "rollout.mem_fraction": [0.7, 0.8],
    }
    data = data_of(Example("two-nodes"))
    sweep(data, {"train.tp": [4]})
    began = time.process_time()
    assert len(sweep(data, axes)) == 1000
    assert time.process_time() - began < 2.0


def test_sweeps_have_an_end() -> None:
    with pytest.raises(ValueError, match="combinations"):
        sweep({}, {"train.tp": list(range(MOST_ROWS + 1))})
    with pytest.raises(ValueError, match="needs fields"):
        sweep({}, {"train.tp": []})


# Comparisons.


def test_a_comparison_shows_fields_findings_and_numbers(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, run_file, "--train.tp=4", "--compare", run_file)
    assert any(line.split() == ["train.tp", "4", "2"] for line in out.splitlines())
    assert "the two plans are the same" in told(capsys, run_file, "--compare", "qwen3-4b")
    found = json.loads(told(capsys, run_file, "--algo.group_size=4", "--compare", "qwen3-4b", "--json"))
    assert found["fields"]["algo.group_size"] == [4, 8]
    wrong = told(capsys, "--recipe", "qwen3-4b", "--train.tp=0", "--compare", "qwen3-4b", status=1)
    assert "only in A: P002 train.tp" in wrong


def test_quantities_that_differ_have_both_values_and_their_ratio() -> None:
    first, second = plan(data_of(Example("two-nodes"))), plan(data_of(Example("two-nodes", {"algo.group_size": 16})))
    changed = {each.name: each for each in compare(first, second).quantities}
    assert changed["time.train_s"].second == pytest.approx(2 * changed["time.train_s"].first)
    assert "model.parameters" not in changed


# Explanations.


@pytest.mark.parametrize("code", sorted(registry()))
def test_every_code_is_explained_by_what_it_says_of_its_own_example(code: str) -> None:
    lines = [line.text for line in explain(code)]
    rule = registry()[code]
    assert lines[0] == f"{code}  {rule.severity}  {rule.path}: {rule.title}"
    assert any(line.startswith("  passes: --recipe ") for line in lines)
    assert " ".join(lines).count(": ") >= 3


def test_a_field_is_explained_with_its_rules_and_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "--explain", "schedule.deadline_s", "--recipe", "laptop")
    assert "default 900.0" in out
    assert "in this plan: 900" in out
    assert "P007  error" in out
    assert "derived" in told(capsys, "--explain", "train.sp", "--recipe", "qwen3-4b")
    assert "must be given" in told(capsys, "--explain", "env.id")


def test_a_number_is_explained_with_its_terms_and_grade(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(data_of(Example("two-nodes")))
    for each in report.quantities:
        text = "\n".join(line.text for line in explain(each.id, report))
        assert each.formula.split()[0] in text
        assert str(each.grade) in text
        assert (each.override or "") in text
    assert "a measured value goes into workload.measured.train_tok_s" in told(
        capsys, "--recipe", "two-nodes", "--explain", "time.train_s"
    )


def test_fields_say_what_their_source_says_of_them() -> None:
    assert docs_of(PlanHardware)["rdma"] == "Whether nodes reach each other's GPU memory without their hosts."
    assert fields()["rollout.pd.transfer"][1] == "transfer"
    assert fields()["workload.measured.mfu"][1] == "mfu"


# Words.


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (3 * 2**30, "bytes", "3.00 GiB"),
        (-(2**20), "bytes", "-1.00 MiB"),
        (0.0123, "s", "12.30 ms"),
        (0, "s", "0.0 s"),
        (91, "s", "91.0 s"),
        (847593, "tokens", "847,593 tokens"),
        (1.4033, "1", "1.403"),
        (float("inf"), "s", "inf s"),
    ],
)
def test_amounts_are_said_in_their_units(value: float, unit: str, said: str) -> None:
    assert amount(value, unit) == said


def test_values_are_written_so_that_they_are_read_back() -> None:
    assert settings({"train.tp": 4, "train.sp": True, "train.dtype": "bf16"}) == (
        "--train.tp=4 --train.sp=true --train.dtype=bf16"
    )
    assert written("4") == '"4"'
    assert written("") == '""'
    assert written(["a", 1]) == '["a", 1]'
    assert settings({"rollout.urls": ["http://a:1"]}) == "'--rollout.urls=[\"http://a:1\"]'"


def test_a_bar_never_leaves_its_frame() -> None:
    assert bar(0.5).count("#") == 20
    assert bar(9.0).endswith("]!")
    assert len({len(bar(share)) for share in (0.0, 0.3, 1.0)}) == 1


# Exports.


def test_files_go_into_a_new_folder_and_over_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "export"
    write_files(folder, {"launch.sh": "#!/bin/sh\n", "deep/plan.json": "{}\n"})
    assert (folder / "launch.sh").stat().st_mode & 0o111
    assert (folder / "deep" / "plan.json").read_text() == "{}\n"
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        write_files(folder, {"launch.sh": "other"})
    assert (folder / "launch.sh").read_text() == "#!/bin/sh\n"
    write_files(folder, {"launch.sh": "other"}, force=True)
    assert (folder / "launch.sh").read_text() == "other"
    assert (folder / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["../out", "a/../../out", "out/..", ""])
def test_no_file_leaves_the_exports_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no file below"):
        write_files(tmp_path / "export", {name: "x", "fine": "y"})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ValueError, match="is no folder"):
        write_files(tmp_path / "taken", {"a": "b"}, force=True)


def test_an_export_writes_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "--recipe", "two-nodes", "--export", tmp_path / "all")
    there = sorted(str(path) for path in (tmp_path / "all").rglob("*") if path.is_file())
    assert sorted(out.split()) == there
    assert (tmp_path / "all" / "launch.sh").stat().st_mode & 0o111
    told(capsys, "--recipe", "two-nodes", "--export", tmp_path / "some", "--only", "config,launch")
    assert {path.name for path in (tmp_path / "some").iterdir()} == {"run.toml", "train.toml", "launch.sh"}
    assert "nothing is called x" in told(
        capsys, "--recipe", "two-nodes", "--export", tmp_path / "x", "--only", "x", status=2
    )
    assert "is not empty" in told(capsys, "--recipe", "two-nodes", "--export", tmp_path / "some", status=2)
    again = told(capsys, tmp_path / "some" / "run.toml", "--compare", "two-nodes")
    assert "only in" not in again


def test_nothing_is_exported_while_errors_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "qwen3-4b", "--train.tp=3", "--export", tmp_path / "out"]
    assert "P204" in told(capsys, *words, status=1)
    assert not (tmp_path / "out").exists()
    told(capsys, *words, "--force", status=1)
    assert "P204" in (tmp_path / "out" / "run.toml").read_text().partition("[model]")[0]
