"""The policy as a megatron GPTModel that answers log p of chosen tokens, built from a Hugging Face folder.

In: the packed nodes of a micro-batch and which of them predict which token. Out: log p [K]. Logits exist only for those K positions: with a
vocabulary of 49,152 they would be most of the memory and a fifth of the work. Nothing is waited for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from palestra.trainer.losses.entropy import Wanted, entropy_of
from palestra.trainer.megatron.core import GPTModel, MLATransformerConfig, RotaryEmbedding, TransformerConfig
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.passthrough import FROM_MODEL, check_passthrough
from palestra.trainer.megatron.spec import block_spec, freeze_expert_bias
from palestra.trainer.types import TrainerError


def transformer_config(arch: Architecture, passthrough: Mapping[str, Any]) -> TransformerConfig:
    """Megatron's configuration for `arch`, with the run's `[megatron]` table on top.

    Raises:
        TrainerError: the table has a key that is unknown or set here, or megatron refuses a value.
    """
    check_passthrough(passthrough)
    own = _decoder(arch) | (_experts(arch) if arch.experts else {}) | (_latent(arch) if arch.latent else {})
    for key in sorted(own.keys() & passthrough.keys()):
        raise TrainerError(f"megatron.{key} cannot be set here: {FROM_MODEL}")
    # Fusions need kernels that only CUDA has; a run may ask for them again.
    off = (
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
    )
    defaults = {**dict.fromkeys(off, False), "gradient_accumulation_fusion": False, "moe_router_dtype": "fp32"}
    if arch.sigmoid_router:
        # The bias that balances experts stays as the checkpoint has it, unless a run asks for megatron's updates.
        defaults["moe_router_bias_update_rate"] = 0.0
    make = MLATransformerConfig if arch.latent else TransformerConfig
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecation that megatron raises about its own default
            return make(**{**defaults, **passthrough, **own})
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainerError(f"megatron refuses this configuration: {error}") from error


def _decoder(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.dense_ffn or arch.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "calculate_per_token_loss": True,
        "qk_layernorm": arch.qk_norm,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": arch.experts,
        "moe_layer_freq": [0] * arch.dense_layers + [1] * (arch.layers - arch.dense_layers) if arch.dense_layers else 1,
        "moe_ffn_hidden_size": arch.ffn,
        "moe_shared_expert_intermediate_size": arch.shared_ffn or None,
        "moe_router_topk": arch.topk,
        "moe_router_pre_softmax": False,  # a softmax over the chosen ones is what norm_topk_prob means
        "moe_router_score_function": "sigmoid" if arch.sigmoid_router else "softmax",
        "moe_router_enable_expert_bias": arch.sigmoid_router,
        "moe_router_topk_scaling_factor": arch.routed_scale if arch.routed_scale != 1.0 else None,
        "moe_router_num_groups": arch.groups or None,
        "moe_router_group_topk": arch.group_topk or None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent(arch: Architecture) -> dict[str, Any]:
    assert arch.latent is not None
    return {
        "q_lora_rank": arch.latent.q_rank or None,
        "kv_lora_rank": arch.latent.kv_rank,
        "qk_head_dim": arch.latent.nope,
        "qk_pos_emb_head_dim": arch.latent.rope,
        "v_head_dim": arch.latent.value,
        "rope_type": "rope",
        "rotary_base": arch.rope_theta,
        "rotary_scaling_factor": 1.0,
    }


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A decoder whose forward gives log p of chosen tokens instead of logits."""

    def __init__(self, arch: Architecture, config: TransformerConfig) -> None:
        super().__init__(
            config,
            block_spec(config),
            vocab_size=arch.vocab,
            max_sequence_length=arch.max_position,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
        )
        if arch.latent is not None:
            # Megatron has each layer make its own; ours come from here, for the places that `hidden` knows.
            self.rotary_pos_emb = RotaryEmbedding(
                arch.latent.rope, rotary_percent=1.0, rotary_base=arch.rope_theta, use_cpu_initialization=True
            )
        freeze_expert_bias(self)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """Nodes [N], their positions [N], who sees whom [1, 1, N, N] -> hidden states after the final norm [N, H]."""
        embedded = self.embedding(input_ids=token_ids[None], position_ids=positions[None])
        rotary = self.rotary_pos_emb(len(token_ids))[positions]  # a node's depth is below the number of nodes
        out: torch.Tensor = self.decoder(hidden_states=embedded, attention_mask=visible, rotary_pos_emb=rotary)
        return out[:, 0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[K, H] -> [K, vocabulary]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out: torch.Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return out[:, 0]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        chunk: int,
        entropy: Wanted = "none",
    ) -> torch.Tensor:
        """log p [K] of `targets` [K] at `temperature` [K], each predicted by the node in `predictors` [K]; with `entropy` [2, K], the
        entropy of each prediction below it, from the same logits.

        `chunk`: predictions whose logits exist at a time, the rest being computed again in the backward pass; 0: all at once.
        """
        # Dividing the states costs less than dividing the logits, and is the same, since the output layer has no bias.
        states = self.hidden(token_ids, positions, visible)[predictors] / temperature[:, None]
        if not chunk or len(targets) <= chunk:
            return self._logprob(states, targets, entropy)
        parts = [slice(start, start + chunk) for start in range(0, len(targets), chunk)]
        found = [checkpoint(self._logprob, states[at], targets[at], entropy, use_reentrant=False) for at in parts]
        return torch.cat(found, dim=-1)

    def _logprob(self, states: torch.Tensor, targets: torch.Tensor, entropy: Wanted) -> torch.Tensor:
        logits = self.logits(states).float()
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        if entropy == "none":
            return logprobs
        return torch.stack([logprobs, entropy_of(logits, trained=entropy == "trained")])
