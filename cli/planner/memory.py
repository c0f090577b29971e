"""Bytes: of training (F4, F5), of an engine (F6), on disk (F17).

F4 follows megatron-core's distributed optimizer (18, 6 + 12/d, 8 + 8/d bytes a parameter). F5 agrees with Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), and with counted saved tensors of real layers. F6 is how SGLang
sizes its pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from palestra.cli.planner.model import (
    attention_total,
    parameters,
    routed_parameters,
)
from palestra.trainer.layout.types import Layout, ModelDims, stage_layers

GIB = 2**30
RUNTIME_BYTES = 3 * GIB
"""Context, communication buffers and workspaces of a training process. A guess."""
FRAGMENTATION = 1.05
"""What the allocator takes for what is asked. A guess."""
IMBALANCE = 1.2
"""Tokens of the busiest expert rank against the mean. A guess."""

UNBOUNDED = 2**53
"""Tokens of a cache that needs no memory."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes a parameter takes in training."""

    weight: int
    gradient: int
    optimizer: int


STATE = {
    ("bf16", "adam"): StateBytes(2, 4, 12),
    ("bf16", "adam_bf16_moments"): StateBytes(2, 4, 8),
    ("bf16", "muon"): StateBytes(2, 4, 8),
    ("bf16", "sgd"): StateBytes(2, 4, 8),
    ("fp32", "adam"): StateBytes(4, 4, 8),
    ("fp32", "adam_bf16_moments"): StateBytes(4, 4, 4),
    ("fp32", "muon"): StateBytes(4, 4, 4),
    ("fp32", "sgd"): StateBytes(4, 4, 4),
}
"""(dtype, optimizer) -> bytes; fp8 training keeps its weights as bf16 does."""


@dataclass(frozen=True, slots=True)
class StageState:
    """What one rank of a pipeline stage keeps through a step (F4)."""

    stage: int
    layers: int
    moe_layers: int
    dense_parameters: float
    """Of one rank, without routed experts."""
    expert_parameters: float
    gpu_bytes: float
    host_bytes: float
    """Of the optimizer, where it is offloaded."""


def training_state(
    model: ModelDims, layout: Layout, state: StateBytes, offload: float = 0.0, copies: int = 1
) -> tuple[StageState, ...]:
    """F4: weights, gradients and optimizer of each stage's rank. `offload`: share of the optimizer on the host; `copies`: 2 with a critic.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    spread = stage_layers(model.layers, layout.pp, layout.first_stage_layers, layout.last_stage_layers)
    if spread is None:
        raise ValueError(f"{model.layers} layers cannot be spread over {layout.pp} stages")
    share = layout.dp * layout.cp if layout.distributed_optimizer else 1
    expert_share = layout.edp if layout.distributed_optimizer else 1
    found, start = [], 0
    for stage, layers in enumerate(spread):
        span = range(start, start + layers)
        start += layers
        dense_layers = sum(1 for index in span if not model.experts or index < model.dense_layers)
        dense = _dense_parameters(model, layout, stage, layers, dense_layers)
        expert = (layers - dense_layers) * routed_parameters(model) / (layout.ep * layout.etp)
        held, optimizer = state.weight + state.gradient, state.optimizer
        moments = dense * optimizer / share + expert * optimizer / expert_share
        found.append(
            StageState(
                stage,
                layers,
                layers - dense_layers,
                dense,
                expert,
                copies * ((dense + expert) * held + moments * (1 - offload)),
                copies * moments * offload,
            )
        )
    return tuple(found)


def _dense_parameters(model: ModelDims, layout: Layout, stage: int, layers: int, dense_layers: int) -> float:
    moe_layers = layers - dense_layers
    sharded = (
        layers * attention_total(model) / model.layers
        + dense_layers * 3 * model.hidden * model.ffn
        + moe_layers * 3 * model.hidden * model.shared_ffn
    )
    router = model.hidden * (model.experts + model.shared_gate) + (model.experts if model.expert_bias else 0)
    last = stage == layout.pp - 1
    replicated = (model.hidden if last else 0) + 2 * model.hidden * layers + moe_layers * router
    table = padded_vocab(model, layout.tp) * model.hidden
    held = (table if stage == 0 else 0) + (table if last and not (model.tied and layout.pp == 1) else 0)
    return (sharded + held) / layout.tp + replicated


def padded_vocab(model: ModelDims, tp: int) -> int:
    """Rows of the embedding: megatron-core pads to a multiple of 128 per rank."""
    return ceil(model.vocab / (128 * tp)) * 128 * tp


def layer_bytes(
    model: ModelDims, *, tp: int = 1, etp: int = 1, sp: bool = True, moe: bool = False, imbalance: float = 1.0
) -> float:
    """F5: saved activations of one layer per token, bf16, flash attention, no dropout. `moe`: a layer with experts."""
    shared = tp if sp else 1
    if model.mla:
        heads = 2 * model.heads * (model.nope_dim + model.rope_dim) + 2 * model.heads * model.v_dim
        # Latents before and after their norm are whole on every rank.
        latent = 2 * (2 * model.q_lora + 2 * model.kv_lora + model.rope_dim)
    else:
        heads, latent = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim, 0
        if model.qk_norm:
            heads += (model.heads + model.kv_heads) * model.head_dim
    attention = 8 * model.hidden / shared + (2 * heads + 4 * model.heads) / tp + latent / shared
    if not moe:
        return attention + 6 * model.ffn / tp
    routed = imbalance * model.topk * (2 * model.hidden * etp + 6 * model.moe_ffn) / tp
    return attention + routed + 6 * model.shared_ffn / tp + 4 * model.experts / shared


def logits_bytes(model: ModelDims, tp: int = 1, entropy: bool = True) -> float:
    """F5: per token of the last stage: bf16 logits, an fp32 copy, its gradient, and the clone that an entropy needs."""
    return padded_vocab(model, tp) / tp * (2 + 4 + 4 + (4 if entropy else 0))


@dataclass(frozen=True, slots=True)
class Activations:
    """What a micro-batch keeps on one rank."""

    layers: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes."""
        return self.layers + self.logits


def activations(
    model: ModelDims,
    layout: Layout,
    *,
    tokens: int,
    layers: int,
    dense_layers: int,
    microbatches: int,
    recompute: str = "none",
    last: bool = True,
    entropy: bool = True,
    logit_tokens: int = 0,
    imbalance: float = IMBALANCE,
) -> Activations:
    """F5: of one stage with `layers`, of which `dense_layers` have no experts, for micro-batches of `tokens` in all.

    `logit_tokens`: predictions whose logits exist at a time; 0: all. Selective recomputation saves what attention makes between its
    projections, which flash attention does not keep anyway: it counts as none.
    """
    local = tokens / layout.cp
    sp = layout.sp or layout.tp == 1
    moe = layer_bytes(model, tp=layout.tp, etp=layout.etp, sp=sp, moe=True, imbalance=imbalance) if model.experts else 0
    dense = layer_bytes(model, tp=layout.tp, etp=layout.etp, sp=sp)
    if not model.experts:
        dense_layers = layers
    whole = (layers - dense_layers) * moe + dense_layers * dense
    one = max(moe, dense if dense_layers else 0)
    full = recompute == "full"
    kept = 2 * model.hidden / (layout.tp if sp else 1) * layers if full else whole
    if layout.pp == 1:
        flying: float = 1
    elif layout.vpp > 1:
        flying = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))
    else:
        flying = min(microbatches, layout.pp)
    logits = 0.0
    if last:
        rows = min(local, logit_tokens) if logit_tokens else local
        logits = rows * logits_bytes(model, layout.tp, entropy)
    return Activations(local * (kept * flying + (one if full else 0)), logits)


@dataclass(frozen=True, slots=True)
class EnginePool:
    """Memory of one GPU of an engine (F6)."""

    weights: float
    """Bytes."""
    rest: float
    """Bytes for caches; negative where weights alone are too many."""
    kv_tokens: int
    """Tokens that fit at a time: of the whole engine, but where attention is copied (`EngineShape.kv_tokens`)."""
    state_slots: int = 0
    """Of linear attention; 0: the model has none."""
    max_running: int | None = None
    """Requests that the slots let run; None: slots bind nothing."""


def engine_weights(model: ModelDims, *, gpus: int, ep: int = 1, replicas: int = 1, weight_bytes: float = 2.0) -> float:
    """F6: bytes of weights on one GPU of an engine with `replicas` copies of attention."""
    counted = parameters(model)
    dense = counted.dense + attention_total(model) * (replicas - 1)
    return (dense / gpus + counted.routed / max(gpus, ep)) * weight_bytes


def engine_pool(
    *,
    memory_bytes: float,
    fraction: float,
    weights: float,
    kv_bytes: int,
    slot_bytes: int = 0,
    ratio: float = 0.9,
    slots_per_request: int = 5,
    pinned_slots: int | None = None,
) -> EnginePool:
    """F6: what is left for caches, and how many tokens and requests that is."""
    rest = fraction * memory_bytes - weights
    states = pinned_slots * slot_bytes if pinned_slots else rest * ratio / (1 + ratio)
    if not slot_bytes:
        states = 0
    # A model that keeps nothing per token has room for any number of them.
    tokens = max(0, int((rest - states) // kv_bytes)) if kv_bytes > 0 else UNBOUNDED
    if not slot_bytes:
        return EnginePool(weights, rest, tokens)
    slots = max(0, int(states // slot_bytes))
    return EnginePool(weights, rest, tokens, slots, slots // slots_per_request)


def balanced_ratio(slot_bytes: int, kv_bytes: int, context: float, slots_per_request: int = 5, draft: int = 0) -> float:
    """F6: memory for states against memory for keys and values at which both run out together.

    Raises:
        ValueError: nothing is kept per token.
    """
    if kv_bytes * context <= 0:
        raise ValueError("a model that keeps nothing per token has no balanced ratio")
    return (slots_per_request + draft) * slot_bytes / (kv_bytes * context)


def cached_bytes(tokens: float, kv_bytes: float, slots: float = 0, slot_bytes: float = 0) -> float:
    """F6: of `tokens` in the cache and `slots` states. A narrower type of keys and values makes only the first term smaller."""
    return tokens * kv_bytes + slots * slot_bytes


def checkpoint_bytes(model: ModelDims, per_parameter: int = 14) -> int:
    """F17: of one checkpoint: weights in 16 bits, and three fp32 numbers of the optimizer."""
    return parameters(model).total * per_parameter


def kept_checkpoint_bytes(one: float, keep: int) -> float:
    """F17: on disk at most: a new one is there before the oldest goes."""
    return one * (keep + 1)


def record_bytes_per_token(model: ModelDims, routed_experts: bool = False) -> int:
    """F17: of a token on record: id and logprob, and with routing replay the experts of each layer (int32)."""
    return 8 + (model.moe_layers * model.topk * 4 if routed_experts else 0)
