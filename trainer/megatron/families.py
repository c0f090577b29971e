"""What a Hugging Face `config.json` says, in the words of megatron's TransformerConfig.

In: the parsed config.json. Out: an `Architecture`. Fields that would change the arithmetic and are not implemented are refused by name.
Pure but for the reading of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.trainer.types import ModelError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Name in config.json -> family. Qwen2.5 calls itself Qwen2."""
SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3")
THETA = {"mixtral": 1_000_000.0}
"""What transformers takes for a missing `rope_theta`, where it is not 10,000."""
HEAD_DIM = {"qwen3": 128}
"""What transformers takes for a missing `head_dim`, where it is not hidden_size / num_attention_heads."""
LINEAR = ("linear", "mamba", "recurrent", "conv", "ssm", "lightning")
"""Parts of the names of layers that are no attention."""
LINEAR_FIELDS = (
    "full_attention_interval",
    "linear_attn_config",
    "linear_num_key_heads",
    "attn_type_list",
    "mamba_d_state",
    "mamba_num_heads",
    "hybrid_override_pattern",
)
"""Fields that only models with such layers have."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values come from one narrow vector per token."""

    q_rank: int
    """Width that queries are squeezed through; 0: they are not."""
    kv_rank: int
    nope: int
    """Width of a query's or key's head without its rotary part."""
    rope: int
    """Width of the rotary part, of which there is one key for all heads."""
    value: int
    """Width of a value's head."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The dimensions of a model."""

    family: str
    """One of `FAMILIES`' values."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys, the rotary part included."""
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
    qk_norm: bool = False
    """Queries and keys are normalised head by head."""
    qkv_bias: bool = False
    dense_layers: int = 0
    """The first layers of a model with experts that have none."""
    dense_ffn: int = 0
    """Their inner width."""
    shared_ffn: int = 0
    """Inner width of the experts that every token goes through; 0: there are none."""
    sigmoid_router: bool = False
    """Scores are sigmoids, and a bias per expert is added for the choice alone; otherwise a softmax over the chosen."""
    routed_scale: float = 1.0
    """What the weights of the chosen experts sum to."""
    groups: int = 0
    """Groups of experts, of which a token may use `group_topk`; 0: all."""
    group_topk: int = 0
    latent: Latent | None = None


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
    family = _family(config)
    for field, (value, supported) in _wanted(config, family).items():
        if value != supported:
            raise ModelError(f"{field} = {value!r} is not supported for {family}; only {supported!r} is")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        own = _experts(config, family) if family in SPARSE else {"ffn": int(config["intermediate_size"])}
        if family == "deepseek_v3":
            own |= _latent(config)
        else:
            own["head_dim"] = int(config.get("head_dim") or HEAD_DIM.get(family, hidden // heads))
        return Architecture(
            family=family,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=_rope_theta(config, family),
            max_position=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=family == "qwen2",
            **own,
        )
    except KeyError as error:
        raise ModelError(f"config.json of a {family} model lacks {error.args[0]}") from None


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    told = ", ".join(names) or config.get("model_type")
    for hybrid in _hybrid(config):
        raise ModelError(
            f"{told} is a hybrid: some of its layers have linear attention ({hybrid}), which is not supported; "
            f"known: {', '.join(FAMILIES)}"
        )
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(f"architecture {told} is not supported; known: {', '.join(FAMILIES)}")
    return family


def _hybrid(config: Mapping[str, Any]) -> Iterator[str]:
    """What in the file speaks of layers without attention; models that see pictures keep it one level down."""
    for part in (config, config.get("text_config") or {}):
        yield from (field for field in LINEAR_FIELDS if part.get(field))
        kinds = part.get("layer_types") or part.get("layers_block_type") or []
        yield from (kind for kind in kinds if any(word in kind for word in LINEAR))


def _experts(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Experts, their router and what is beside them."""
    if family == "mixtral":
        return {
            "ffn": int(config["intermediate_size"]),
            "experts": int(config["num_local_experts"]),
            "topk": int(config["num_experts_per_tok"]),
        }
    own: dict[str, Any] = {"ffn": int(config["moe_intermediate_size"]), "topk": int(config["num_experts_per_tok"])}
    if family == "qwen3_moe":
        # transformers 5 writes num_local_experts, earlier ones num_experts.
        return own | {"experts": int(config["num_experts" if "num_experts" in config else "num_local_experts"])}
    shared = int(config["n_shared_experts"] or 0)
    if shared < 1:
        raise ModelError(f"n_shared_experts = {shared} is not supported for {family}; it has one or more")
    dense = int(config["first_k_dense_replace"] or 0)
    if dense >= int(config["num_hidden_layers"]):
        raise ModelError(f"first_k_dense_replace = {dense}: no layer is left that has experts")
    if own["topk"] < 2:
        raise ModelError(f"num_experts_per_tok = {own['topk']} is not supported for {family}; 2 or more are")
    return own | _groups(config, own["topk"]) | {
        "experts": int(config["n_routed_experts"]),
        "shared_ffn": shared * own["ffn"],
        "dense_layers": dense,
        "dense_ffn": int(config["intermediate_size"]),
        "sigmoid_router": True,
        "routed_scale": float(config["routed_scaling_factor"]),
    }  # fmt: skip


def _groups(config: Mapping[str, Any], topk: int) -> dict[str, int]:
    # What a file leaves out is what transformers takes for it.
    groups, allowed = int(config.get("n_group", 8) or 1), int(config.get("topk_group", 4) or 1)
    if allowed >= groups:
        return {}
    if topk // allowed != 2:
        # Megatron rates a group by its best topk / topk_group experts, the model by its best two.
        raise ModelError(
            f"topk_group = {allowed} with num_experts_per_tok = {topk} is not supported: only two experts per group are"
        )
    return {"groups": groups, "group_topk": allowed}


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, keys = config["num_attention_heads"], config.get("num_key_value_heads")
    if keys not in (None, heads):
        raise ModelError(f"num_key_value_heads = {keys} is not supported for deepseek_v3; only {heads} is")
    latent = Latent(
        q_rank=int(config["q_lora_rank"] or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope=int(config["qk_nope_head_dim"]),
        rope=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
    )
    return {"latent": latent, "head_dim": latent.nope + latent.rope}


def _rope_theta(config: Mapping[str, Any], family: str) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or config.get("rope_theta") or THETA.get(family, 10_000.0))


def _wanted(config: Mapping[str, Any], family: str) -> dict[str, tuple[Any, Any]]:
    """Field -> what it is and what it may be: everything that would silently train another function than the checkpoint's."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"rope scaling {kind!r} is not supported")
    others = sorted({kind for kind in config.get("layer_types") or () if kind != "full_attention"})
    wanted: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "attention_dropout": (config.get("attention_dropout", 0.0) or 0.0, 0.0),
        "partial_rotary_factor": (config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)), 1.0),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "layer_types": (others, []),
        "quantization_config": (config.get("quantization_config"), None),
    }
    if family == "llama":
        wanted["rope_interleaved"] = (config.get("rope_interleaved", False), False)
    if family in SPARSE:
        wanted["tie_word_embeddings"] = (config.get("tie_word_embeddings", False), False)
    if family == "qwen3_moe":
        wanted["norm_topk_prob"] = (config.get("norm_topk_prob", False), True)
        wanted["mlp_only_layers"] = (config.get("mlp_only_layers") or [], [])
        wanted["decoder_sparse_step"] = (config.get("decoder_sparse_step", 1), 1)
    elif family == "mixtral":
        wanted["sliding_window"] = (config.get("sliding_window"), None)
        wanted["router_jitter_noise"] = (config.get("router_jitter_noise", 0.0), 0.0)
    elif family == "deepseek_v3":
        wanted["norm_topk_prob"] = (config.get("norm_topk_prob", True), True)
        wanted["rope_interleave"] = (config.get("rope_interleave", True), True)
        wanted["moe_layer_freq"] = (config.get("moe_layer_freq", 1), 1)
        wanted["scoring_func"] = (config.get("scoring_func", "sigmoid"), "sigmoid")
        wanted["topk_method"] = (config.get("topk_method", "noaux_tc"), "noaux_tc")
    return wanted
