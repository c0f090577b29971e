"""Times, queues and shares: F7 to F16. Every function is arithmetic on its arguments; what is a guess is said by whoever calls."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from palestra.cli.planner.model import attention_total, kv_token_bytes, parameters
from palestra.trainer.layout.types import ModelDims

DECODE_EFFICIENCY = 0.6
"""Share of the roofline that decoding reaches. A guess."""
TCP_SHARE = 0.1
"""What is left of a network card without RDMA. A guess."""
MFU_DENSE, MFU_MOE = 0.35, 0.20
"""Shares of the peak that training reaches. Guesses."""


def experts_touched(experts: int, topk: int, batch: float) -> float:
    """F7: experts of a layer that a batch of tokens goes to, on average, where each is as likely."""
    return experts * (1 - (1 - min(1.0, topk / experts)) ** batch) if experts else 0.0


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of an engine's decoding (F7), seconds."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two: the roofline."""
        return max(self.memory_s, self.compute_s)


def decode_step(
    model: ModelDims,
    *,
    gpus: int,
    batch: float,
    context: float,
    hbm: float,
    flops: float,
    weight_bytes: float = 2.0,
    kv_bits: int = 16,
    attention_tp: int | None = None,
    replicas: int = 1,
) -> DecodeStep:
    """F7: weights that are touched and caches of the batch are read once; each token is multiplied with its active parameters.

    `replicas`: copies of attention in the engine, each with its share of the batch and a cache of its own.
    """
    counted = parameters(model)
    touched = experts_touched(model.experts, model.topk, batch) / model.experts if model.experts else 0.0
    looked_up = 0 if model.tied else model.vocab * model.hidden
    copied = (replicas - 1) * attention_total(model)
    weights = (counted.dense - looked_up + copied + counted.routed * touched) * weight_bytes / gpus
    cache = max(1.0, batch / replicas) * context * kv_token_bytes(model, attention_tp or gpus, kv_bits)
    return DecodeStep((weights + cache) / hbm, 2 * counted.active * batch / (gpus * flops))


def rollout_seconds(
    *,
    tokens: float,
    engines: int,
    tok_s: float,
    tail_tokens: float,
    single_tok_s: float,
    waits_s: float = 0.0,
) -> float:
    """F7: of a batch. `tail_tokens`: of the longest rollout, which more engines do not make shorter; `waits_s`: tools and judges of one."""
    return max(tokens / (engines * tok_s), tail_tokens / single_tok_s) + waits_s


def train_seconds(
    model: ModelDims,
    *,
    tokens: float,
    gpus: int,
    flops: float,
    mfu: float,
    full_recompute: bool = True,
    extra_forwards: int = 1,
    pp: int = 1,
    microbatches: int = 8,
    vpp: int = 1,
) -> float:
    """F8: of a batch. `extra_forwards`: passes for logprobs of the policy and of a reference."""
    active = parameters(model).active
    per_token = 6 * active * (4 / 3 if full_recompute else 1) + 2 * active * extra_forwards
    return tokens * per_token / (gpus * flops * mfu) * (1 + (pp - 1) / (microbatches * vpp))


def publish_seconds(size: float, bandwidth: float, t0: float) -> float:
    """F9: of a whole copy."""
    return size / bandwidth + t0


@dataclass(frozen=True, slots=True)
class Delta:
    """A publish of changes against one of everything (F9)."""

    full_s: float
    delta_s: float
    break_even: float
    """Share of changed bytes at which both take as long."""


def delta_seconds(size: float, *, disk: float, diff_rate: float, apply_rate: float, density: float, t0: float) -> Delta:
    """F9: find the difference, write it, apply it."""
    delta = size / diff_rate + density * size / disk + size / apply_rate + t0
    return Delta(size / disk + t0, delta, 1 - disk * (1 / diff_rate + 1 / apply_rate))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of each schedule (F10), seconds."""

    sync: float
    overlapped: float
    """The least that an asynchronous schedule can take."""

    @property
    def speedup(self) -> float:
        """An upper bound."""
        return self.sync / self.overlapped


def step_times(rollout_s: float, train_s: float, publish_s: float) -> StepTimes:
    """F10."""
    return StepTimes(rollout_s + train_s + publish_s, max(rollout_s, train_s) + publish_s)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rollouts under way (F11)."""

    demand: float
    """That keep the engines busy, by Little's law."""
    cap: int
    """That the staleness bound lets be under way or wait."""
    idle: float
    """Share of the engines' time that the cap leaves idle."""
    versions: float
    """That one rollout sees."""


def in_flight(*, rollouts: int, period_s: float, duration_s: float, staleness: int) -> InFlight:
    """F11: `rollouts` of a batch per `period_s`, each lasting `duration_s`."""
    demand, cap = rollouts / period_s * duration_s, (staleness + 1) * rollouts
    return InFlight(demand, cap, max(0.0, 1 - cap / demand) if demand else 0.0, 1 + duration_s / period_s)


def admitted(version: int, staleness: int, batch: int) -> int:
    """F11: rollouts that may have been begun in all, under a version."""
    return (version + staleness + 1) * batch


def pd_rate(
    *, prefill: int, prefill_rate: float, decode: int, decode_rate: float, kv_bytes: float, kv_bandwidth: float
) -> float:
    """F12: requests per second that prefill engines, decode engines and the link between them let through."""
    return min(prefill * prefill_rate, decode * decode_rate, kv_bandwidth / kv_bytes)


def balanced_share(first_s: float, first: int, second_s: float, second: int) -> float:
    """F10: share of all GPUs for the first of two phases so that both take as long, where each is as fast as it has GPUs.

    `first_s` is what it takes with `first` GPUs, `second_s` with `second`.
    """
    return first_s * first / (first_s * first + second_s * second)


def best_split(engines: int, prefill_rate: float, decode_rate: float) -> tuple[int, float]:
    """F12: how many of `engines` should prefill, and the requests per second that then pass."""
    rates = {each: min(each * prefill_rate, (engines - each) * decode_rate) for each in range(1, max(2, engines))}
    best = max(rates, key=lambda each: (rates[each], -each))
    return best, rates[best]


def hicache_saved(hit: float, prefill_s: float, io_s: float, bookkeeping_s: float) -> float:
    """F13: seconds that a second cache saves of a prompt; below zero it costs."""
    return hit * prefill_s - io_s - bookkeeping_s


@dataclass(frozen=True, slots=True)
class GroupPrefix:
    """What rollouts of one prompt share (F14)."""

    hit: float
    saved: int
    """Prompt tokens that are not computed again."""
    shared_tokens: int
    unshared_tokens: int


def group_prefix(group: int, prompt: int, response: int) -> GroupPrefix:
    """F14: on one engine, after the first has been prefilled, and nothing evicted."""
    return GroupPrefix(
        (group - 1) / group, (group - 1) * prompt, prompt + group * response, group * (prompt + response)
    )


@dataclass(frozen=True, slots=True)
class TurnPrefix:
    """What turns of one conversation share (F14)."""

    prompt_tokens: float
    new_tokens: float

    @property
    def hit(self) -> float:
        """Share of prompt tokens that are in the cache."""
        return 1 - self.new_tokens / self.prompt_tokens


def turn_prefix(prompt: float, assistant: float, observation: float, turns: float) -> TurnPrefix:
    """F14."""
    whole = turns * prompt + (assistant + observation) * turns * (turns - 1) / 2
    return TurnPrefix(whole, prompt + (turns - 1) * observation)


def zero_variance(success: float, group: int) -> float:
    """F15: share of groups whose rollouts all succeed or all fail."""
    return success**group + (1 - success) ** group


def groups_to_submit(groups: int, wasted: float) -> float:
    """F15: groups to play for `groups` that teach something; infinite where none does."""
    return groups / (1 - wasted) if wasted < 1 else inf


def boxes_needed(episodes_per_s: float, create_s: float, busy_s: float, destroy_s: float) -> float:
    """F16: boxes in use at a time, by Little's law."""
    return episodes_per_s * (create_s + busy_s + destroy_s)
