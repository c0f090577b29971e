"""A run is held to the planner's rules before anything starts, and keeps what they said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.cli.config import ConfigError, check_config
from palestra.cli.planner.types import Severity
from palestra.cli.preflight import NAME, dims_of_folder, keep, preflight

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
PLAIN: dict[str, Any] = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_a_plain_run_passes_without_a_warning_and_its_report_is_kept(folder: Path) -> None:
    report = preflight(PLAIN, folder, "run.toml")
    assert report is not None
    assert (report.of(Severity.ERROR), report.of(Severity.WARNING), report.not_built) == ((), (), ())
    assert keep(folder, report) == []
    kept = json.loads((folder / NAME).read_text())
    assert {each["id"] for each in kept["quantities"]} >= {"model.parameters", "train.gpu_bytes"}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"rollout": {"context_len": 4096}}, r"run\.toml: P425 rollout\.context_len: .*2,?048"),
        ({"hardware": {"host_mem_bytes": 10**8}}, r"run\.toml: P80"),
    ],
)
def test_what_a_plan_refuses_a_run_refuses(folder: Path, tables: dict[str, Any], said: str) -> None:
    check_config({**PLAIN, **tables}, "run.toml")  # the sections by themselves find nothing wrong with it
    with pytest.raises(ConfigError, match=said):
        preflight({**PLAIN, **tables}, folder, "run.toml")


def test_a_warning_is_a_line_and_stops_nothing(folder: Path) -> None:
    tables = {**PLAIN, "algo": {"max_response": 64}, "workload": {"response_p99": 64}}
    warned = keep(folder, preflight(tables, folder, "run.toml"))
    assert len(warned) == 1
    assert warned[0].startswith("P713 algo.max_response: ")


def test_a_model_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL | {"architectures": ["Odd"], "model_type": "odd"}))
    with pytest.raises(ConfigError, match=r"config\.json: .*odd"):
        dims_of_folder(folder)
    assert preflight(PLAIN, folder, "run.toml") is None, "the trainer says whether it can train it"
    assert keep(folder, None) == ["not planned: the planner does not know the model's architecture"]
    with pytest.raises(ConfigError, match=r"P001 algo\.groupsize"):
        preflight({**PLAIN, "algo": {"groupsize": 2}}, folder, "run.toml")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        preflight(PLAIN, folder, "run.toml")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        preflight(PLAIN, folder / "nowhere", "run.toml")
