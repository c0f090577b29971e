"""The part of the policy that one rank holds: a pipeline stage (or a chunk of one), its share of every tensor, its slice of the nodes.

In: the packed nodes of a micro-batch, the same on every rank of a model. Out: hidden states for the next stage, or on the last one
log p [K] of the chosen tokens, whole on every tensor and context parallel rank. Waits for the ranks of the same model in every layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from palestra.trainer.layout.types import Layout
from palestra.trainer.megatron.core import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    mappings,
    parallel_state,
)
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.model import transformer_config
from palestra.trainer.megatron.parallel.attention import ContextAttention
from palestra.trainer.megatron.spec import block_spec
from palestra.trainer.types import TrainerError

SPREAD = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Other ways of megatron's to say which stage has which layers."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """A micro-batch as tensors: N nodes, K predictions."""

    token_ids: torch.Tensor
    """[N]."""
    positions: torch.Tensor
    """[N]."""
    visible: torch.Tensor | None
    """[1, 1, N, N] 0 where a node (row) may look, -inf elsewhere; None: plainly causal."""
    predictors: torch.Tensor
    """[K] the node that predicts."""
    targets: torch.Tensor
    """[K]."""
    temperature: torch.Tensor
    """[K]."""


def parallel_config(arch: Architecture, layout: Layout, passthrough: Mapping[str, Any]) -> TransformerConfig:
    """Megatron's configuration for `arch` under `layout`.

    Raises:
        TrainerError: megatron refuses it, or `[megatron]` has a key that the layout sets.
    """
    config = transformer_config(arch, passthrough)
    changes: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.pp,
        # Between two stages of an interleaved schedule the next one is the previous one too: in batches, the messages to both would be
        # taken for each other, and gradients would be wrong in silence.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers if layout.pp > 1 else None,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers if layout.pp > 1 else None,
    }
    for key in sorted({*changes, *SPREAD} & passthrough.keys()):
        raise TrainerError(f"megatron.{key} cannot be set here: the layout says how layers are spread and stages talk")
    try:
        return dataclasses.replace(config, **changes)
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainerError(f"megatron refuses this layout: {error}") from error


def stage_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank's stage (or chunk of it), and the final norm."""
    whole = block_spec(config)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    start = get_transformer_layer_offset(config, vp_stage, rank)
    layers = whole.layer_specs[start : start + get_num_layers_to_build(config, vp_stage, rank)]
    if config.context_parallel_size > 1:
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = ContextAttention
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=whole.layer_norm)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary with as many unused entries as make it divide over `tp` ranks."""
    return math.ceil(vocab / tp) * tp


class StageModel(GPTModel):  # type: ignore[misc]
    """One rank's part of a decoder: `PolicyModel`, spread out."""

    def __init__(self, arch: Architecture, config: TransformerConfig, vp_stage: int | None = None) -> None:
        ends = {"ignore_virtual": False, "vp_stage": vp_stage}
        super().__init__(
            config,
            stage_spec(config, vp_stage),
            vocab_size=padded_vocab(arch.vocab, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_position,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        self._words = arch.vocab
        if self.post_process:
            # States are gathered over the sequence before the predicting ones are chosen; the output layer must not gather again.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    def forward(self, nodes: Nodes, chunk: int) -> torch.Tensor:
        """Hidden states for the next stage, or log p [K]. `chunk` as in `PolicyModel.forward`."""
        ranks, rank = self.config.context_parallel_size, parallel_state.get_context_parallel_rank()
        width = len(nodes.token_ids) // ranks
        mine = slice(rank * width, (rank + 1) * width)
        positions = nodes.positions[mine]
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=nodes.token_ids[None, mine], position_ids=positions[None])
        # `packed_seq` keeps megatron from cutting the table for its own order of context parallel chunks.
        rotary = self.rotary_pos_emb(len(nodes.token_ids), packed_seq=True)[positions]
        visible = nodes.visible if nodes.visible is None else nodes.visible[:, :, mine]
        hidden: torch.Tensor = self.decoder(hidden_states=embedded, attention_mask=visible, rotary_pos_emb=rotary)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self._predict(hidden[:, 0], nodes, mine, chunk)

    def _predict(self, hidden: torch.Tensor, nodes: Nodes, mine: slice, chunk: int) -> torch.Tensor:
        """log p [K] from the states of this rank's nodes; the other context parallel ranks add theirs."""
        (own,) = torch.nonzero((nodes.predictors >= mine.start) & (nodes.predictors < mine.stop), as_tuple=True)
        states = hidden[nodes.predictors[own] - mine.start] / nodes.temperature[own][:, None]
        targets = nodes.targets[own]
        starts = range(0, len(own), chunk) if 0 < chunk < len(own) else range(0)
        if starts:
            parts = [slice(start, start + chunk) for start in starts]
            found = torch.cat([checkpoint(self._logprob, states[at], targets[at], use_reentrant=False) for at in parts])
        else:
            found = self._logprob(states, targets)
        if self.config.context_parallel_size == 1:
            return found
        whole = torch.zeros(len(nodes.predictors), device=hidden.device).index_put((own,), found)
        out: torch.Tensor = mappings.reduce_from_tensor_model_parallel_region(
            whole, group=parallel_state.get_context_parallel_group()
        )
        return out

    def _logprob(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.output_layer(states[:, None], weight=weight)[0][:, 0].float()
        return split_logprob(logits, targets, self._words)


def split_logprob(logits: torch.Tensor, targets: torch.Tensor, words: int) -> torch.Tensor:
    """log p [K] of `targets` from logits [K, share] whose columns are this tensor parallel rank's share of the vocabulary.

    `words`: entries that there are; those beyond are padding. Logits are left as they are (megatron's own function overwrites them).
    """
    group, rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
    width = logits.shape[1]
    start = rank * width
    if start + width > words:
        beyond = torch.arange(start, start + width, device=logits.device) >= words
        logits = logits.masked_fill(beyond, -math.inf)
    top = logits.detach().amax(dim=-1)
    if group.size() > 1:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    reduce = mappings.reduce_from_tensor_model_parallel_region
    total = reduce((logits - top[:, None]).exp().sum(dim=-1), group=group)
    local = targets - start
    here = (local >= 0) & (local < width)
    found = logits.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
    picked = reduce(torch.where(here, found, 0.0), group=group)
    out: torch.Tensor = picked - top - total.log()
    return out
