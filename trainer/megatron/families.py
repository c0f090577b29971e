"""What a Hugging Face `config.json` says, in the words of megatron's TransformerConfig. Two families: Llama and Qwen3-MoE.

In: the parsed config.json. Out: an `Architecture`. Fields that would change the arithmetic and are not implemented are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.trainer.types import ModelError

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3_moe"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The dimensions of a model."""

    family: str
    """llama or qwen3_moe."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of a dense layer, or of one expert."""
    vocab: int
    norm_eps: float
    rope_theta: float
    max_position: int
    tied: bool
    experts: int = 0
    """0 for a dense model."""
    topk: int = 0


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: it is missing or is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The model that `config` describes.

    Raises:
        ModelError: of another architecture, a field is missing, or a field asks for what is not implemented.
    """
    names = config.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(
            f"architecture {', '.join(names) or config.get('model_type')} is not supported; known: {', '.join(FAMILIES)}"
        )
    _refuse(config, family)
    moe = family == "qwen3_moe"
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Architecture(
            family=family,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["moe_intermediate_size" if moe else "intermediate_size"]),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=_rope_theta(config),
            max_position=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=_experts(config) if moe else 0,
            topk=int(config["num_experts_per_tok"]) if moe else 0,
        )
    except KeyError as error:
        raise ModelError(f"config.json of a {family} model lacks {error.args[0]}") from None


def _experts(config: Mapping[str, Any]) -> int:
    # transformers 5 writes num_local_experts, earlier ones num_experts.
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse(config: Mapping[str, Any], family: str) -> None:
    """Everything that would silently train another function than the one in the checkpoint."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"rope scaling {kind!r} is not supported")
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    wanted: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "attention_dropout": (config.get("attention_dropout", 0.0) or 0.0, 0.0),
        "partial_rotary_factor": (partial, 1.0),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    if family == "llama":
        wanted["rope_interleaved"] = (config.get("rope_interleaved", False), False)
    else:
        wanted["tie_word_embeddings"] = (config.get("tie_word_embeddings", False), False)
        wanted["norm_topk_prob"] = (config.get("norm_topk_prob", False), True)
        wanted["mlp_only_layers"] = (config.get("mlp_only_layers") or [], [])
        wanted["decoder_sparse_step"] = (config.get("decoder_sparse_step", 1), 1)
    for field, (value, supported) in wanted.items():
        if value != supported:
            raise ModelError(f"{field} = {value!r} is not supported for {family}; only {supported!r} is")
