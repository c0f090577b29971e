"""What rollouts are like on average, and how long a step of them takes. Pure.

Efficiencies that nobody measured are guesses (`flow.py`); `[workload.measured]` takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from palestra.cli.planner.flow import (
    DECODE_EFFICIENCY,
    MFU_DENSE,
    MFU_MOE,
    TCP_SHARE,
    DecodeStep,
    InFlight,
    StepTimes,
    decode_step,
    in_flight,
    publish_seconds,
    rollout_seconds,
    step_times,
    train_seconds,
)

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case

ELSEWHERE_TOK_S = 1000.0
"""Sampled tokens per second of an engine of which nothing is known. A guess."""


@dataclass(frozen=True, slots=True)
class Work:
    """One rollout on average, tokens."""

    prompt: int
    response: int
    """Of a turn."""
    response_p99: int
    observation: int
    turns: float
    waits_s: float = 0.0
    """That it waits for tools and its judge, seconds."""

    @property
    def sampled(self) -> float:
        """Tokens that the engine samples."""
        return self.turns * self.response

    @property
    def row_tokens(self) -> float:
        """Tokens of its row in training."""
        return self.prompt + self.turns * (self.response + self.observation)

    @property
    def tail(self) -> float:
        """Sampled tokens of a long rollout."""
        return self.response_p99 + (self.turns - 1) * self.response


@dataclass(frozen=True, slots=True)
class Times:
    """A step, seconds. Guesses, but where something was measured."""

    decode: DecodeStep | None
    """None: the engines run elsewhere."""
    decode_tok_s: float
    """Of one sampling engine with `batch` requests."""
    single_tok_s: float
    """Of one request alone on an engine."""
    running: int
    """Requests that one engine decodes at a time: those that it has, or that it has room for."""
    mfu: float
    rollout_s: float
    train_s: float
    publish_s: float
    tail_s: float
    """Of the longest rollout alone."""
    step: StepTimes
    flight: InFlight
    period_s: float
    """Between two batches, as the schedule has it: one after the other, or overlapped."""


def work_of(case: Case) -> Work:
    """The workload, with what was left out."""
    given, algo = case.input.workload, case.input.algo
    turns = given.turns or float(algo.max_turns)
    response = given.response_tokens or max(1, algo.max_response // 2)
    room = case.max_context - turns * (response + given.observation_tokens)
    prompt = given.prompt_tokens or max(1, (algo.max_prompt or int(max(2, room))) // 2)
    waits_s = turns * given.tool_s + given.judge_s
    return Work(prompt, response, given.response_p99 or algo.max_response, given.observation_tokens, turns, waits_s)


def times_of(case: Case) -> Times | None:
    """A step's times; None where nothing is known of the device, or nothing trains."""
    if case.device is None or not case.train_gpus:
        return None
    work, measured = case.work, case.input.workload.measured
    engines = case.sampling_engines
    batch = running_at_once(case, engines)
    step, tok_s, single = decoding(case, batch)
    rollout_s = sampling_seconds(case, engines)
    mfu = measured.mfu or (MFU_MOE if case.model.experts else MFU_DENSE)
    train_s, publish_s = _training(case, mfu), _publishing(case)
    both = step_times(rollout_s, train_s, publish_s)
    period = both.sync if case.input.schedule.kind == "sync" else both.overlapped
    flight = in_flight(
        rollouts=case.rollouts,
        period_s=period,
        duration_s=work.sampled * min(batch, max(1.0, case.running)) / tok_s + work.waits_s,
        staleness=max(0, case.staleness),
    )
    return Times(
        step, tok_s, single, batch, mfu, rollout_s, train_s, publish_s, work.tail / single, both, flight, period
    )


def _publishing(case: Case) -> float:
    if case.input.workload.measured.publish_s:
        return case.input.workload.measured.publish_s
    if case.input.weights.mode == "delta":
        return case.delta.delta_s
    return publish_seconds(case.sent_bytes, publish_bandwidth(case), case.input.weights.t0_s)


def sampling_seconds(case: Case, engines: int) -> float:
    """F7: a batch on so many engines of this case's kind. The device must be known."""
    work = case.work
    _, tok_s, single = decoding(case, running_at_once(case, engines))
    return rollout_seconds(
        tokens=case.rollouts * case.input.algo.oversample * work.sampled,
        engines=engines,
        tok_s=tok_s,
        tail_tokens=work.tail,
        single_tok_s=single,
        waits_s=work.waits_s,
    )


def decoding(case: Case, batch: int) -> tuple[DecodeStep | None, float, float]:
    """A decoding step of one engine, its tokens per second, and those of a request alone on it; a measured speed scales all batches.

    The device must be known. The step is None where engines run elsewhere.
    """
    measured = case.input.workload.measured.decode_tok_s
    engine, device, work = case.decoding, case.device, case.work
    assert device is not None
    if engine is None:
        tok_s = measured or ELSEWHERE_TOK_S
        return None, tok_s, tok_s / batch
    context = work.prompt + work.turns * (work.response + work.observation) / 2

    def at(requests: int) -> DecodeStep:
        return decode_step(
            case.model,
            gpus=engine.gpus,
            batch=requests,
            context=context,
            hbm=device.hbm,
            flops=device.flops,
            weight_bytes=engine.weight_bytes,
            kv_bits=engine.kv_bits,
            attention_tp=engine.attention_tp,
            replicas=engine.replicas,
        )

    efficiency = DECODE_EFFICIENCY
    if measured:
        usual = running_at_once(case, engine.count)
        efficiency = measured * at(usual).seconds / usual
    step = at(batch)
    tok_s = batch / step.seconds * efficiency
    return step, tok_s, min(efficiency / at(1).seconds, tok_s)


def requests_of(case: Case, engines: int) -> float:
    """Rollouts that one of so many engines has: its share of a batch or of what the schedule lets be in flight, or what it lets run."""
    most = min(case.input.schedule.max_in_flight or case.rollouts, case.rollouts) / engines
    return min(most, case.input.rollout.max_running or most)


def running_at_once(case: Case, engines: int) -> int:
    """Requests that one of so many engines decodes at a time: those that it has, or that it has room for."""
    has = max(1, ceil(requests_of(case, engines)))
    return has if case.fit_running is None else max(1, min(has, case.fit_running))


def _training(case: Case, mfu: float) -> float:
    measured, device = case.input.workload.measured, case.device
    tokens = case.rollouts * case.work.row_tokens
    if measured.train_tok_s:
        return tokens / (measured.train_tok_s * case.train_gpus)
    assert device is not None
    return train_seconds(
        case.model,
        tokens=tokens,
        gpus=case.train_gpus,
        flops=device.flops,
        mfu=mfu,
        full_recompute=case.recompute == "full",
        extra_forwards=1 + (case.input.algo.kl_coef > 0),
        pp=case.layout.pp,
        microbatches=case.microbatches,
        vpp=case.layout.vpp,
    )


def transport(case: Case) -> str:
    """ipc, nccl, gloo or disk."""
    given = case.input.weights.transport
    if given in (None, "none"):
        return {"colocated": "ipc", "separate": "nccl", "external": "disk", "cpu": "disk"}[case.mode]
    if given == "tensor":
        return "ipc"
    if given == "distributed":
        return "gloo" if case.on_cpu else "nccl"
    return str(given)


def publish_bandwidth(case: Case) -> float:
    """Bytes per second of a publish. A guess."""
    hardware = case.input.hardware
    return {
        "ipc": hardware.nvlink_bw,
        "nccl": hardware.nic_bw,
        "gloo": hardware.nic_bw * TCP_SHARE,
        "disk": hardware.shared_fs_bw,
    }[transport(case)]
