"""What engines have to hold and let through: tokens in the cache (F14), prefill and decode apart (F12), a second cache (F13),
a publish of changes (F9). Pure.

Rates that nobody measured are guesses; `[workload.measured]` takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from palestra.cli.planner.engines import EngineShape, engine_of
from palestra.cli.planner.flow import (
    TCP_SHARE,
    Delta,
    best_split,
    delta_seconds,
    hicache_saved,
    pd_rate,
    turn_prefix,
)
from palestra.cli.planner.model import kv_token_bytes

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case

PREFILL_EFFICIENCY = 0.4
"""Share of the peak that computing prompts reaches. A guess."""
DIFF_RATE, APPLY_RATE = 20e9, 40e9
"""Bytes per second at which changes are found and put in. Guesses."""
DELTA_DENSITY = 0.03
"""Share of the weights' bytes that a publish changes. A guess."""
BOOKKEEPING_S = 0.02
"""Of a second cache, per request. A guess."""
TOGETHER = ("consistent_hashing", "cache_aware", "manual")
"""Policies of a router that keep the rollouts of a prompt on one engine."""


@dataclass(frozen=True, slots=True)
class Held:
    """What rollouts keep in the caches of one engine, tokens: prompts, and half of what they will have said and seen."""

    batch: int
    """Rollouts that the fullest engine has."""
    each: float
    """Of one rollout, with its share of a shared prompt."""
    shared: float
    """Of the batch, where rollouts of one prompt share it."""
    unshared: float


def siblings_meet(case: Case) -> bool:
    """Whether rollouts of one prompt find each other's beginning in an engine's cache."""
    rollout = case.input.rollout
    one = case.decoding is not None and case.decoding.count == 1
    return rollout.prefix_cache and (one or rollout.router_policy in TOGETHER)


def held_of(case: Case) -> Held:
    """F14, of the engines that sample."""
    work = case.work
    half = work.turns * (work.response + work.observation) / 2
    prompts = 1 / case.input.algo.group_size if siblings_meet(case) else 1.0
    batch = max(1, ceil(case.running))
    return Held(
        batch,
        work.prompt * prompts + half,
        case.running * prompts * work.prompt + batch * half if prompts < 1 else batch * (work.prompt + half),
        batch * (work.prompt + half),
    )


def fit_of(case: Case) -> int | None:
    """Rollouts that one sampling engine has room for; None: nothing is known to bind."""
    engine, bounds = case.decoding, []
    if engine is not None and engine.pool is not None:
        bounds.append(int(engine.kv_tokens // max(1.0, case.held.each)))
        if engine.pool.max_running is not None:
            bounds.append(engine.pool.max_running * engine.replicas)
    if case.input.rollout.max_running is not None:
        bounds.append(case.input.rollout.max_running)
    return min(bounds) if bounds else None


def prefill_tok_s(case: Case, engine: EngineShape) -> float | None:
    """Prompt tokens per second of an engine; None: nothing is known of the device. A guess where it was not measured."""
    if case.input.workload.measured.prefill_tok_s:
        return case.input.workload.measured.prefill_tok_s
    if case.device is None or case.parameters.active <= 0:
        return None
    return engine.gpus * case.device.flops * PREFILL_EFFICIENCY / (2 * case.parameters.active)


def link_bandwidth(case: Case) -> float:
    """Bytes per second between two nodes, per GPU. A guess."""
    hardware = case.input.hardware
    return hardware.nic_bw if hardware.rdma else hardware.nic_bw * TCP_SHARE


@dataclass(frozen=True, slots=True)
class PdFlow:
    """Rollouts per second through prefill engines, decode engines and the link between them (F12)."""

    prefill: int
    """Engines."""
    prefill_rate: float
    """Rollouts per second of one of them."""
    decode: int
    decode_rate: float
    kv_bytes: float
    """That a rollout sends from one kind to the other."""
    kv_bandwidth: float
    rate: float
    best_prefill: int | None
    """Engines that should prefill; None: they are of two sizes."""
    best_rate: float
    """Of the best split, the link not counted."""

    @property
    def limit(self) -> str:
        """Whatever lets the fewest through: prefill, decode or transfer."""
        rates = {
            "prefill": self.prefill * self.prefill_rate,
            "decode": self.decode * self.decode_rate,
            "transfer": self.kv_bandwidth / self.kv_bytes,
        }
        return min(rates, key=lambda name: rates[name])


def pd_flow_of(case: Case) -> PdFlow | None:
    """F12; None where prompts and completions are not apart, or nothing is known of the device."""
    pd, times = case.input.rollout.pd, case.times
    before, after = engine_of(case, "prefill"), engine_of(case, "decode")
    if pd is None or before is None or after is None or times is None:
        return None
    work = case.work
    speed = prefill_tok_s(case, before)
    if speed is None:
        return None
    turns = turn_prefix(work.prompt, work.response, work.observation, work.turns)
    first = 1 / case.input.algo.group_size if siblings_meet(case) else 1.0
    computed = work.prompt * first + turns.new_tokens - work.prompt
    prefill_rate, decode_rate = speed / max(1.0, computed), times.decode_tok_s / work.sampled
    kv_bytes = max(1.0, turns.prompt_tokens * kv_token_bytes(case.model, 1, after.kv_bits))
    bandwidth = case.input.workload.measured.kv_bw or link_bandwidth(case) * min(pd.prefill_gpus, pd.decode_gpus)
    rate = pd_rate(
        prefill=before.count,
        prefill_rate=prefill_rate,
        decode=after.count,
        decode_rate=decode_rate,
        kv_bytes=kv_bytes,
        kv_bandwidth=bandwidth,
    )
    best, best_rate = None, rate
    if before.gpus == after.gpus:
        best, best_rate = best_split(before.count + after.count, prefill_rate, decode_rate)
    return PdFlow(before.count, prefill_rate, after.count, decode_rate, kv_bytes, bandwidth, rate, best, best_rate)


@dataclass(frozen=True, slots=True)
class SecondCache:
    """What a cache on the host saves of one request (F13), seconds."""

    hit: float
    prefill_s: float
    io_s: float
    saved_s: float


def second_cache_of(case: Case) -> SecondCache | None:
    """F13; None where there is none, or nothing is known of the device."""
    engine = case.engines[0] if case.engines else None
    if not case.input.rollout.hicache or engine is None or case.on_cpu:
        return None
    speed = prefill_tok_s(case, engine)
    if speed is None:
        return None
    work = case.work
    turns = turn_prefix(work.prompt, work.response, work.observation, work.turns)
    given = case.input.workload.measured.prefix_hit
    hit = turns.hit if given is None else given
    tokens = turns.prompt_tokens / work.turns
    prefill_s = tokens / speed
    io_s = hit * tokens * engine.kv_bytes / case.input.hardware.pcie_bw
    return SecondCache(hit, prefill_s, io_s, hicache_saved(hit, prefill_s, io_s, BOOKKEEPING_S))


def delta_of(case: Case) -> Delta:
    """F9: a publish of changes beside one of everything, both through the folder that all nodes see."""
    density = case.input.workload.measured.delta_density
    return delta_seconds(
        case.sent_bytes,
        disk=case.input.hardware.shared_fs_bw,
        diff_rate=DIFF_RATE,
        apply_rate=APPLY_RATE,
        density=DELTA_DENSITY if density is None else density,
        t0=case.input.weights.t0_s,
    )
