"""A model's dimensions from its Hugging Face `config.json`. Pure: the file is read elsewhere.

Field names are those of transformers 5 and of the files on the hub, which differ for experts (`num_experts`, `num_local_experts`,
`n_routed_experts`). What `ModelDims` cannot say is refused by name rather than left out of the count: biases of output projections, layers
with experts that do not follow each other, windows of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Dims = dict[str, Any]


class UnknownModelError(ValueError):
    """P005: a config.json that the planner cannot read dimensions from."""

    def __init__(self, model_type: object, what: str) -> None:
        super().__init__(f"{what} of model_type {model_type}: give the dimensions in [model] of the run's file")


def dims_of_config(config: Mapping[str, Any]) -> Dims:
    """Dimensions by the names of `[model]`.

    Raises:
        UnknownModelError: the architecture is unknown, a field is missing, or the model has something that dimensions cannot say.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UnknownModelError(family, f"cannot read the dimensions (known: {', '.join(FAMILIES)})")
    read = _Reader(config, family)
    dims = {**_common(read), **FAMILIES[family](read)}
    if dims.get("experts") and not dims["dense_layers"]:
        # Files keep a width that no layer has.
        dims["ffn"] = 0
    return dims


class _Reader:
    """Fields of a file, held to what a dimension can be."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config, self.family = config, family

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number under the first of the names that is there; a null counts as not there."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UnknownModelError(self.family, f"cannot read {name} = {value!r}")
            return value
        if default is None:
            raise UnknownModelError(self.family, f"cannot read {' or '.join(names)}")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        """A yes or no."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnknownModelError(self.family, f"cannot read {name} = {value!r}")
        return value

    def names(self, name: str) -> Sequence[Any] | None:
        """A list with an entry per layer; None: there is none."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != self.number("num_hidden_layers"):
            raise UnknownModelError(self.family, f"cannot read {name}: it has no entry per layer")
        return value

    def refuse(self, *names: str) -> None:
        """Raises where one of the flags is set."""
        for name in names:
            if self.flag(name):
                raise UnknownModelError(self.family, f"cannot count {name} = true")


def _common(read: _Reader) -> Dims:
    """What every family has, and what none may have."""
    read.refuse("use_sliding_window", "mlp_bias")
    if strange := [name for name in read.names("layer_types") or () if name not in ("full_attention", LINEAR)]:
        raise UnknownModelError(read.family, f"cannot count layer_types with {strange[0]!r}")
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    if not heads:
        raise UnknownModelError(read.family, "cannot read num_attention_heads = 0")
    return {
        "layers": read.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": read.number("num_key_value_heads", default=heads),
        "head_dim": read.number("head_dim", default=hidden // heads),
        "ffn": read.number("intermediate_size", default=0),
        "vocab": read.number("vocab_size"),
        "tied": read.flag("tie_word_embeddings"),
        "max_position": read.number("max_position_embeddings"),
        "mtp_layers": read.number("num_nextn_predict_layers", default=0),
    }


LINEAR = "linear_attention"


def _llama(read: _Reader) -> Dims:
    # The flag gives the output projection a bias too.
    read.refuse("attention_bias")
    return {}


def _qwen2(read: _Reader) -> Dims:
    return {"qkv_bias": True}


def _qwen3(read: _Reader) -> Dims:
    read.refuse("attention_bias")
    return {"qk_norm": True}


def _experts(read: _Reader) -> Dims:
    return {
        "experts": read.number("num_experts", "num_local_experts", "n_routed_experts"),
        "topk": read.number("num_experts_per_tok"),
        "moe_ffn": read.number("moe_intermediate_size"),
    }


def _mixtral(read: _Reader) -> Dims:
    if window := read.number("sliding_window", default=0):
        raise UnknownModelError(read.family, f"cannot count sliding_window = {window}")
    return {
        "experts": read.number("num_local_experts"),
        "topk": read.number("num_experts_per_tok"),
        "moe_ffn": read.number("intermediate_size"),
        "dense_layers": 0,
    }


def _qwen3_moe(read: _Reader) -> Dims:
    return {**_qwen3(read), **_experts(read), "dense_layers": _exceptions(read)}


def _exceptions(read: _Reader) -> int:
    """Leading dense layers of a file that says which layers have no experts."""
    if read.number("decoder_sparse_step", default=1) != 1:
        raise UnknownModelError(read.family, f"cannot count decoder_sparse_step = {read.number('decoder_sparse_step')}")
    dense = read.config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise UnknownModelError(read.family, f"cannot count mlp_only_layers = {dense}: they are not the first layers")
    return len(dense)


def _qwen3_next(read: _Reader) -> Dims:
    return {
        **_qwen3_moe(read),
        "attn_gate": True,
        "shared_ffn": read.number("shared_expert_intermediate_size"),
        "shared_gate": True,
        "linear_layers": _linear(read),
        "lin_k_heads": read.number("linear_num_key_heads"),
        "lin_v_heads": read.number("linear_num_value_heads"),
        "lin_k_dim": read.number("linear_key_head_dim"),
        "lin_v_dim": read.number("linear_value_head_dim"),
        "lin_conv": read.number("linear_conv_kernel_dim"),
    }


def _linear(read: _Reader) -> int:
    if (kinds := read.names("layer_types")) is not None:
        return kinds.count(LINEAR)
    interval, layers = read.number("full_attention_interval", default=4), read.number("num_hidden_layers")
    return layers - layers // max(1, interval)


def _shared(read: _Reader) -> Dims:
    """Experts with shared ones beside them, and leading dense layers."""
    if read.number("moe_layer_freq", default=1) != 1:
        raise UnknownModelError(read.family, f"cannot count moe_layer_freq = {read.number('moe_layer_freq')}")
    experts = _experts(read)
    return {
        **experts,
        "shared_ffn": read.number("n_shared_experts", default=0) * experts["moe_ffn"],
        "dense_layers": _leading(read),
        "expert_bias": True,
    }


def _leading(read: _Reader) -> int:
    kinds = read.names("mlp_layer_types")
    if kinds is None:
        return read.number("first_k_dense_replace")
    dense = kinds.count("dense")
    if list(kinds) != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise UnknownModelError(read.family, "cannot count mlp_layer_types: the dense layers are not the first")
    return dense


def _glm4_moe(read: _Reader) -> Dims:
    # Here the flag is about queries, keys and values alone.
    return {
        **_shared(read),
        "qkv_bias": read.flag("attention_bias"),
        "qk_norm": read.flag("use_qk_norm"),
    }


def _deepseek_v3(read: _Reader) -> Dims:
    read.refuse("attention_bias")
    nope = read.number("qk_nope_head_dim")
    return {
        **_shared(read),
        # Of a head without its rotary part; files say something else or nothing.
        "head_dim": nope,
        "q_lora": read.number("q_lora_rank", default=0),
        "kv_lora": read.number("kv_lora_rank"),
        "nope_dim": nope,
        "rope_dim": read.number("qk_rope_head_dim"),
        "v_dim": read.number("v_head_dim"),
    }


FAMILIES: Mapping[str, Callable[[_Reader], Dims]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek_v3,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}
"""`model_type` -> what it has beside the common fields."""
