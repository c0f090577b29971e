"""What a model's own dimensions are held to, before anything is laid out. Pure: `ModelDims` in, hits out."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.envs.findings import Hit
from palestra.trainer.layout.types import ModelDims


def grouped_heads(model: ModelDims) -> Iterator[Hit]:
    """P101: query heads that key heads cannot be shared by. Latent attention has a key head for each query head."""
    if not model.mla and model.heads % model.kv_heads:
        yield Hit(
            f"{model.heads} query heads are not a multiple of {model.kv_heads} key heads",
            "copy both numbers from the model's config.json (num_attention_heads, num_key_value_heads)",
        )


def routed_experts(model: ModelDims) -> Iterator[Hit]:
    """P102: a token goes to more experts than there are, or to none."""
    if model.experts and not 0 < model.topk <= model.experts:
        yield Hit(
            f"a token cannot go to {model.topk} of {model.experts} experts",
            f"give model.topk between 1 and {model.experts} (num_experts_per_tok of config.json)",
        )


def expert_width(model: ModelDims) -> Iterator[Hit]:
    """P103: experts without a width, or a width without experts."""
    if model.experts and not model.moe_ffn:
        yield Hit(f"{model.experts} experts have no width", "give model.moe_ffn (moe_intermediate_size of config.json)")
    elif model.moe_ffn and not model.experts:
        yield Hit(
            f"model.moe_ffn = {model.moe_ffn}, but the model has no experts",
            "give model.experts, or take model.moe_ffn away",
        )


def layer_counts(model: ModelDims) -> Iterator[Hit]:
    """P104: more layers of a kind than there are."""
    for name, count in (("dense_layers", model.dense_layers), ("linear_layers", model.linear_layers)):
        if count > model.layers:
            yield Hit(
                f"model.{name} = {count} of {model.layers} layers", f"at most {model.layers}", path=f"model.{name}"
            )


def shared_linear_heads(model: ModelDims) -> Iterator[Hit]:
    """P105: value heads of linear attention that key heads cannot be shared by."""
    if not model.linear_layers:
        return
    if not model.lin_k_heads or model.lin_v_heads % model.lin_k_heads:
        yield Hit(
            f"{model.lin_v_heads} value heads of linear attention are not a multiple of {model.lin_k_heads} key heads",
            "copy both from the model's config.json (linear_num_value_heads, linear_num_key_heads)",
        )
