"""What follows from a model's shapes alone: parameters (F1), bytes of its caches (F2, F3). Integer arithmetic.

The parameter counts equal megatron-core's report formula and the published totals. Cache layouts are those of SGLang's memory pools.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.trainer.layout.types import ModelDims


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters (F1). Layers that predict further tokens are not counted."""

    total: int
    active: int
    """That a token goes through."""
    embedding: int
    """Embedding and output projection."""
    routed: int
    """Of routed experts."""

    @property
    def dense(self) -> int:
        """All but routed experts."""
        return self.total - self.routed


def attention_parameters(model: ModelDims) -> int:
    """Of one attention layer, norms of the block excepted."""
    hidden = model.hidden
    if model.mla:
        width = model.nope_dim + model.rope_dim
        if model.q_lora:
            queries = hidden * model.q_lora + model.q_lora + model.q_lora * model.heads * width
        else:
            queries = hidden * model.heads * width
        latent = hidden * (model.kv_lora + model.rope_dim) + model.kv_lora
        return (
            queries
            + latent
            + model.kv_lora * model.heads * (model.nope_dim + model.v_dim)
            + model.heads * model.v_dim * hidden
        )
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    bias = (queries + 2 * keys) if model.qkv_bias else 0
    norms = 2 * model.head_dim if model.qk_norm else 0
    return hidden * queries * (2 if model.attn_gate else 1) + 2 * hidden * keys + queries * hidden + bias + norms


def linear_parameters(model: ModelDims) -> int:
    """Of one layer of linear attention (gated delta net)."""
    keys, values = model.lin_k_heads * model.lin_k_dim, model.lin_v_heads * model.lin_v_dim
    projections = model.hidden * (2 * keys + 2 * values) + model.hidden * 2 * model.lin_v_heads
    return (
        projections
        + (2 * keys + values) * model.lin_conv
        + 2 * model.lin_v_heads
        + model.lin_v_dim
        + values * model.hidden
    )


def attention_total(model: ModelDims) -> int:
    """Of all layers' attention, of both kinds."""
    return model.attn_layers * attention_parameters(model) + model.linear_layers * linear_parameters(model)


def routed_parameters(model: ModelDims) -> int:
    """Of all routed experts of one layer."""
    return model.experts * 3 * model.hidden * model.moe_ffn


def unrouted_parameters(model: ModelDims) -> int:
    """Of a layer with experts: router, shared expert and its gate."""
    return (
        model.hidden * model.experts
        + (model.experts if model.expert_bias else 0)
        + 3 * model.hidden * model.shared_ffn
        + (model.hidden if model.shared_gate else 0)
    )


def parameters(model: ModelDims) -> Parameters:
    """F1: how many parameters a model has."""
    hidden, moe = model.hidden, model.moe_layers
    body = attention_total(model) + 2 * hidden * model.layers + hidden
    mlp = (model.layers - moe) * 3 * hidden * model.ffn + moe * (routed_parameters(model) + unrouted_parameters(model))
    embedding = model.vocab * hidden * (1 if model.tied else 2)
    total = body + mlp + embedding
    idle = moe * (routed_parameters(model) - model.topk * 3 * hidden * model.moe_ffn)
    return Parameters(total, total - idle, embedding, moe * routed_parameters(model))


def kv_token_bytes(model: ModelDims, tp: int = 1, bits: int = 16) -> int:
    """F2: bytes of attention cache of one token on one GPU, where attention is spread over `tp`. Latent caches are whole on each."""
    if not model.mla:
        heads = max(1, -(-model.kv_heads // tp))
        return 2 * heads * model.head_dim * model.attn_layers * bits // 8
    index = (model.index_dim + model.index_dim // 128 * 4) * model.attn_layers if model.index_dim else 0
    if model.index_dim and bits == 8:
        # Sparse attention keeps the latent in float8 with scales, and the rotary part in 16 bits.
        return (model.kv_lora + model.kv_lora // 128 * 4 + 2 * model.rope_dim) * model.attn_layers + index
    return (model.kv_lora + model.rope_dim) * model.attn_layers * bits // 8 + index


def state_slot_bytes(model: ModelDims, tp: int = 1, ssm_bits: int = 32, conv_bits: int = 16) -> int:
    """F3: bytes of one request's recurrent state on one GPU; 0 for a model without linear attention."""
    if not model.linear_layers:
        return 0
    keys, values = model.lin_k_heads * model.lin_k_dim, model.lin_v_heads * model.lin_v_dim
    conv = (2 * keys + values) // tp * (model.lin_conv - 1)
    state = model.lin_v_heads // tp * model.lin_v_dim * model.lin_k_dim
    return model.linear_layers * (state * ssm_bits // 8 + conv * conv_bits // 8)
