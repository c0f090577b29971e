"""The layer of the model: megatron's local spec with a norm and an attention that run on every device.

Queries, keys and values come in as [S, B, heads, dim]; out goes [S, B, heads * dim]. Nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from palestra.trainer.megatron.core import (
    MegatronModule,
    MLASelfAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)

LATENT_EPS = 1e-6


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a layer spec calls. Megatron's own wrapper refuses sequence parallelism, which its MoE
    layer demands under tensor parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaAttention(MegatronModule):  # type: ignore[misc]
    """Scaled dot-product attention with grouped queries. Without a mask it is causal; a mask [1, 1, S, S] is added to the scores (0 or
    -inf), or True where a token may look.

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
        k_channels: int | None = None,
        v_channels: int | None = None,
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
        """[S, B, heads, dim] each (fewer heads for keys and values, another dim for values) -> [S, B, heads * values' dim]."""
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


class LatentNorm(RMSNorm):
    """The norm of squeezed queries, keys and values: transformers gives it its own epsilon, whatever the model's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_EPS)


class _Placed:
    """Answers with the rotary table that the layer was handed."""

    table: torch.Tensor | None = None

    def get_rotary_seq_len(self, *_: Any) -> int:
        return 0

    def __call__(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self.table


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-head latent attention whose places come from the model, as every other attention's do.

    Megatron's own numbers the sequence itself, and a node of a token tree is not where it stands in the sequence.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb
        self.rotary_pos_emb: Any = _Placed()

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, rotary_pos_emb: torch.Tensor | None = None, **rest: Any
    ) -> Any:
        """[S, B, hidden] and the table [S, 1, 1, rotary width] of its places -> [S, B, hidden] and no bias."""
        self.rotary_pos_emb.table = rotary_pos_emb
        return super().forward(hidden_states, attention_mask, **rest)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """All layers and the final norm for a model with this configuration."""
    kinds = {False: _layer_spec(config, None), True: _layer_spec(config, config.num_moe_experts)}
    sparse = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    return TransformerBlockSubmodules(layer_specs=[kinds[bool(each)] for each in sparse], layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, experts: int | None) -> Any:
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention
    attention.submodules.core_attention = SdpaAttention
    if config.multi_latent_attention:
        attention.module = LatentAttention
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return layer


def freeze_expert_bias(model: torch.nn.Module) -> None:
    """Makes the bias of each router that has one a parameter without a gradient, so that it is loaded, kept and handed out with the rest.

    Megatron keeps it as a buffer, which no list of parameters shows.
    """
    for module in model.modules():
        bias = dict(module.named_buffers(recurse=False)).get("expert_bias")
        if bias is not None:
            del module.expert_bias
            module.register_parameter("expert_bias", torch.nn.Parameter(bias, requires_grad=False))
