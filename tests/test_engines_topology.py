"""Which engines there are: every field of `[rollout]` becomes an option of SGLang's, and both forms of a topology file mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.cli.engines.topology import of_config, options_of, read_topology
from palestra.cli.engines.types import EngineGroup, EngineSetupError
from palestra.server.config import EngineSection

OURS = """
models:
  - name: policy
    update_weights: true
    groups:
      - {kind: prefill, gpus: 2, gpus_per_engine: 2, overrides: {mem_fraction_static: 0.85, context-length: 12288}}
      - {kind: decode, gpus: 6, gpus_per_engine: 2, overrides: {mem_fraction_static: 0.85, context_length: 12288}}
"""
SLIME = """
sglang:
  - name: policy
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.85, context_length: 12288}}
      - {worker_type: decode, num_gpus: 6, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.85, context_length: 12288}}
"""
SHARED = {"mem_fraction_static": 0.85, "context_length": 12288}
GROUPS = (EngineGroup("prefill", 1, 2, SHARED), EngineGroup("decode", 3, 2, SHARED))
BASE = {"context_length": 2048}


def rollout(**fields: Any) -> EngineSection:
    return EngineSection(engine="sglang", **fields)


def write(folder: Path, text: str) -> Path:
    path = folder / "sglang.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [OURS, SLIME], ids=["ours", "slime"])
def test_both_forms_of_a_file_mean_the_same(tmp_path: Path, text: str) -> None:
    assert read_topology(write(tmp_path, text)).groups == GROUPS


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"gpus_per_engine": 8, "ep": 4}, {"ep_size": 4}),
        ({"gpus_per_engine": 8, "dp": 2, "dp_attention": True}, {"attn_dp_size": 2}),
        ({"mem_fraction": 0.8, "max_total_tokens": 4096, "page_size": 16}, {
            "max_total_tokens": 4096, "page_size": 16, "mem_fraction_static": 0.8,
        }),
        ({"weight_dtype": "bf16", "max_running": 7}, {"dtype": "bfloat16", "max_running_requests": 7}),
        ({"weight_dtype": "fp8"}, {}),
        ({"kv_dtype": "fp8_e4m3", "ssm_dtype": "fp32"}, {"kv_cache_dtype": "fp8_e4m3", "mamba_ssm_dtype": "float32"}),
        ({"ssm_dtype": "bf16", "state_ratio": 0.5}, {"mamba_ssm_dtype": "bfloat16", "mamba_full_memory_ratio": 0.5}),
        ({"state_slots_pin": 9, "state_strategy": "no_buffer"}, {
            "max_mamba_cache_size": 9, "mamba_radix_cache_strategy": "no_buffer",
        }),
        ({"prefix_cache": False}, {"disable_radix_cache": True}),
        ({"attention_backend": "fa3", "deterministic": True}, {
            "attention_backend": "fa3", "enable_deterministic_inference": True,
        }),
        ({"hicache": True}, {"enable_hierarchical_cache": True}),
        ({"hicache": True, "hicache_ratio": 3.0}, {"enable_hierarchical_cache": True, "hicache_ratio": 3.0}),
        ({"routed_experts": True, "router": "none"}, {"enable_return_routed_experts": True}),
    ],
)  # fmt: skip
def test_every_field_becomes_an_option_and_defaults_become_none(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert options_of(rollout(**fields)) == {**BASE, **options}


def test_what_has_no_option_is_said_in_the_environment() -> None:
    (group,) = of_config(rollout(conv_dtype="fp32")).groups
    assert (group.options, group.env) == (BASE, {"SGLANG_MAMBA_CONV_DTYPE": "float32"})


def test_engines_of_the_configuration() -> None:
    assert of_config(rollout(engines=4, gpus_per_engine=2)).groups == (EngineGroup("regular", 4, 2, BASE),)


def test_prefill_and_decode_of_the_configuration_with_a_second_cache_for_prompts_only() -> None:
    pd = {
        "prefill_gpus": 2,
        "prefill_gpus_per_engine": 2,
        "decode_gpus": 6,
        "decode_gpus_per_engine": 2,
        "ib_device": "mlx5_0",
    }
    prefill, decode = of_config(rollout(pd=pd, hicache=True, hicache_ratio=3.0)).groups
    both = {**BASE, "disaggregation_transfer_backend": "mooncake", "disaggregation_ib_device": "mlx5_0"}
    assert decode == EngineGroup("decode", 3, 2, both)
    assert prefill == EngineGroup("prefill", 1, 2, {**both, "enable_hierarchical_cache": True, "hicache_ratio": 3.0})


def test_a_files_overrides_come_after_the_fields(tmp_path: Path) -> None:
    topology = of_config(rollout(topology=str(write(tmp_path, OURS)), context_len=4096, max_running=8, hicache=True))
    assert [group.options["context_length"] for group in topology.groups] == [12288, 12288]
    assert [group.options["max_running_requests"] for group in topology.groups] == [8, 8]
    assert [group.options.get("enable_hierarchical_cache") for group in topology.groups] == [True, None]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp": 2}, "that is rollout.engines"),
        ({"gpus_per_engine": 4, "ep": 3}, "expert parallel size 3 does not divide an engine's 4 GPUs"),
        ({"gpus_per_engine": 4, "dp": 8, "dp_attention": True}, "data parallel attention size 8 does not divide"),
        ({"gpus_per_engine": 12}, "an engine of 12 GPUs needs whole nodes, and a node has 8"),
        ({"hicache": True, "prefix_cache": False}, "it needs rollout.prefix_cache = true"),
        ({"state_ratio": 0.5, "state_slots_pin": 3}, "both size the states"),
        ({"deterministic": True, "attention_backend": "torch_native"}, "torch_native is not deterministic"),
        ({"pd": {"prefill_gpus": 1, "decode_gpus": 1}, "engines": 2}, "rollout.pd says how many engines"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineSetupError, match=said):
        of_config(rollout(**fields))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("- a", "neither `models:` nor `sglang:`"),
        ("models: 3", "models is no list"),
        ("models: [{groups: []}]", "a list of groups is missing"),
        ("models: [{groups: [{kind: regular}]}]", "gpus must be a whole number from 1 on, not None"),
        ("models: [{groups: [{gpus: true}]}]", "not True"),
        ("models: [{groups: [{gpus: 3, gpus_per_engine: 2}]}]", "3 GPUs are no multiple of 2"),
        ("models: [{groups: [{gpus: 1, kind: encoder}]}]", "'encoder' is no kind of engine; there are regular, prefill, decode"),
        ("models: [{groups: [{gpus: 1, num_gpus: 1}]}]", "unknown num_gpus; there are gpus, gpus_per_engine, kind, overrides"),
        ("models: [{groups: [{gpus: 1, overrides: [a]}]}]", "overrides is no table"),
        ("models: [{groups: [{gpus: 1, kind: prefill}]}]", "prefill and decode engines need each other"),
        ("models: [{groups: [{gpus: 1}, {gpus: 1, kind: prefill}, {gpus: 1, kind: decode}]}]", "stand alone"),
        ("models: [{groups: [{gpus: 1}]}, {groups: [{gpus: 1}], update_weights: false}]", "must have one model"),
        ("models: [{model_path: x, groups: [{gpus: 1}]}]", "model_path is model.path of the run"),
        (
            "models: [{groups: [{gpus: 1, kind: prefill},"
            " {gpus: 1, kind: decode, overrides: {enable_hierarchical_cache: true}}]}]",
            "belongs to prefill engines",
        ),
        ("!!python/object/apply:os.system ['false']", "cannot be read"),
    ],
)  # fmt: skip
def test_files_that_describe_no_engines_are_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(EngineSetupError, match=said) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineSetupError, match=r"gone\.yaml cannot be read"):
        read_topology(tmp_path / "gone.yaml")
