"""The layer of the model: megatron's local spec with a norm and an attention that run on every device.

Queries, keys and values come in as [S, B, heads, dim]; out goes [S, B, heads * dim]. Nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from palestra.trainer.megatron.core import (
    MegatronModule,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a layer spec calls. Megatron's own wrapper refuses sequence parallelism, which its MoE
    layer demands under tensor parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention with grouped queries. Without a mask it is causal; a mask [1, 1, S, S] is True where a token may look.

    Megatron's stock local attention takes neither packed sequences nor a fused kernel on the CPU.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[S, B, heads, dim] each (fewer heads for keys and values) -> [S, B, heads * dim]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """All layers and the final norm for a model with this configuration."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
