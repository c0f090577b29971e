"""The engines of a case: how many, on how many GPUs, with what memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from palestra.cli.planner.memory import EnginePool, engine_pool, engine_weights
from palestra.cli.planner.model import kv_token_bytes, state_slot_bytes

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case

WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0, "fp8": 1.0, "int4": 0.5}
BITS = {"auto": 16, "bf16": 16, "fp32": 32, "fp8_e4m3": 8, "fp8_e5m2": 8}
SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3, "no_radix": 1}
"""State slots of a request, by strategy (SGLang 0.5.23)."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Engines of one kind."""

    kind: Literal["regular", "prefill", "decode"]
    count: int
    gpus: int
    """Of one engine; 1 without GPUs."""
    attention_tp: int
    """Over how many ranks attention is spread."""
    replicas: int
    """Copies of attention, each with its share of the requests and a cache of its own (dp_attention)."""
    kv_bytes: int
    """F2, per token and GPU."""
    slot_bytes: int
    """F3; 0 without linear attention."""
    slots_per_request: int
    fraction: float
    weight_bytes: float
    """Bytes of a weight."""
    kv_bits: int
    pool: EnginePool | None
    """None: the device's memory is unknown, or it is the host's."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into all caches of one engine; 0 where that is unknown."""
        return self.pool.kv_tokens * self.replicas if self.pool else 0

    @property
    def max_running(self) -> int | None:
        """Requests that the states of one engine let run; None: they bind nothing, or it is unknown."""
        if self.pool is None or self.pool.max_running is None:
            return None
        return self.pool.max_running * self.replicas


def engine_shapes(case: Case) -> tuple[EngineShape, ...]:
    """Regular engines, or prefill and then decode engines; none where they run elsewhere."""
    rollout = case.input.rollout
    if case.mode == "external" or rollout.engine == "openai":
        return ()
    if case.on_cpu:
        return (_shape(case, "regular", rollout.engines or 1, 1),)
    if rollout.pd is not None:
        pd = rollout.pd
        return (
            _shape(case, "prefill", pd.prefill_gpus // pd.prefill_gpus_per_engine, pd.prefill_gpus_per_engine),
            _shape(case, "decode", pd.decode_gpus // pd.decode_gpus_per_engine, pd.decode_gpus_per_engine),
        )
    count = rollout.engines or case.rollout_gpus // rollout.gpus_per_engine
    return (_shape(case, "regular", count, rollout.gpus_per_engine),)


def engine_of(case: Case, kind: str) -> EngineShape | None:
    """The engines of a kind."""
    return next((each for each in case.engines if each.kind == kind), None)


def mem_fraction(case: Case) -> float:
    """Share of a GPU that an engine takes for weights and caches."""
    return case.input.rollout.mem_fraction or (0.7 if case.colocated else 0.85)


def weight_dtype(case: Case) -> str:
    """What engines keep weights in; fp8 training publishes fp8 only where the engine asks for it."""
    return case.input.rollout.weight_dtype or ("fp32" if case.train_dtype == "fp32" else "bf16")


def _shape(case: Case, kind: Literal["regular", "prefill", "decode"], count: int, gpus: int) -> EngineShape:
    rollout, model = case.input.rollout, case.model
    replicas = min(rollout.dp, gpus) if rollout.dp_attention else 1
    tp = gpus // replicas
    dtype = weight_dtype(case)
    bits = 32 if rollout.kv_dtype == "auto" and dtype == "fp32" else BITS[rollout.kv_dtype]
    kv = kv_token_bytes(model, tp, bits)
    slot = state_slot_bytes(
        model, tp, 16 if rollout.ssm_dtype == "bf16" else 32, 32 if rollout.conv_dtype == "fp32" else 16
    )
    slots = SLOTS[rollout.state_strategy] + rollout.draft_tokens
    weights = engine_weights(
        model,
        gpus=gpus,
        ep=rollout.ep,
        replicas=replicas,
        weight_bytes=WEIGHT_BYTES[dtype],
    )
    fraction = mem_fraction(case)
    memory = 0 if case.device is None else case.device.memory_bytes
    pool = None
    if memory:
        pool = engine_pool(
            memory_bytes=memory,
            fraction=fraction,
            weights=weights,
            kv_bytes=kv,
            slot_bytes=slot,
            ratio=rollout.state_ratio,
            slots_per_request=slots,
            pinned_slots=rollout.state_slots_pin,
        )
        if rollout.max_total_tokens is not None:
            pool = replace(pool, kv_tokens=min(pool.kv_tokens, rollout.max_total_tokens))
    return EngineShape(
        kind, max(1, count), gpus, tp, replicas, kv, slot, slots, fraction, WEIGHT_BYTES[dtype], bits, pool
    )
