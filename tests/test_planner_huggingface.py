"""Dimensions out of a config.json: against transformers' own models, counted, and against the presets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from palestra.cli.planner.huggingface import FAMILIES, UnknownModelError, dims_of_config
from palestra.cli.planner.model import parameters
from palestra.cli.planner.presets import MODELS
from palestra.trainer.layout.types import ModelDims

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 28,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 6, "head_dim": 16}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {**EXPERTS, "num_experts": 6, "mlp_only_layers": [0]}),
    "glm4_moe": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, plain": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v3": ("deepseek_v3", {**ROUTED, **LATENT, "first_k_dense_replace": 1}),
    "deepseek_v3, whole queries": ("deepseek_v3", {**ROUTED, **LATENT, "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {**ROUTED, **LATENT}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **DELTA, "num_experts": 6, "head_dim": 16}),
}


def written(model_type: str, **fields: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a small model."""
    found: dict[str, Any] = CONFIG_MAPPING[model_type](**{**SMALL, **fields}).to_dict()
    return found


def counted(model_type: str, **fields: Any) -> int:
    """Parameters of transformers' own model, with the router's bias, which it keeps as a buffer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SMALL, **fields}))
    biases = sum(each.numel() for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return biases + sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers_own_model(case: str) -> None:
    model_type, fields = CASES[case]
    dims = ModelDims(**dims_of_config(written(model_type, **fields)))
    assert parameters(dims).total == counted(model_type, **fields)


def test_a_config_without_list_of_layers_has_one_of_four_with_a_cache() -> None:
    config = written("qwen3_next", **EXPERTS, **DELTA, num_experts=6)
    del config["layer_types"]
    assert dims_of_config(config)["linear_layers"] == 3
    assert dims_of_config({**config, "full_attention_interval": 2})["linear_layers"] == 2


HUB: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "moonlight-16b-a3b": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    },
}
"""Fields as the files on the hub spell them."""


@pytest.mark.parametrize("preset", HUB)
def test_a_file_of_the_hub_gives_the_preset(preset: str) -> None:
    assert ModelDims(**dims_of_config(HUB[preset])) == MODELS[preset]


def test_kimi_reads_as_deepseek() -> None:
    config = HUB["moonlight-16b-a3b"]
    assert dims_of_config({**config, "model_type": "kimi_k2"}) == dims_of_config(config)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_moe", {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {**EXPERTS, "num_experts": 6, "mlp_only_layers": [2]}, "mlp_only_layers"),
        ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 64}, "sliding_window"),
        ("deepseek_v3", {**ROUTED, **LATENT, "moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {**ROUTED, **LATENT, "attention_bias": True}, "attention_bias"),
        ("glm4_moe_lite", {**ROUTED, **LATENT, "mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"hidden_size": "32"}, "hidden_size"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("deepseek_v3", {**ROUTED, **LATENT, "kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(model_type: str, fields: dict[str, Any], named: str) -> None:
    config = {**written(model_type), **fields}
    with pytest.raises(UnknownModelError, match=f"{named}.* of model_type {model_type}"):
        dims_of_config(config)


@pytest.mark.parametrize("config", [{}, {"model_type": "mamba"}, {"model_type": ["llama"]}])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelError, match="qwen3_next"):
        dims_of_config(config)


def test_every_family_is_counted() -> None:
    assert {model_type for model_type, _ in CASES.values()} | {"kimi_k2"} == set(FAMILIES)
