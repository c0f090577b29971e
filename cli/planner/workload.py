"""What rollouts are like on average, and how long a step of them takes. Pure.

Efficiencies that nobody measured are guesses (`flow.py`); `[workload.measured]` takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.cli.planner.flow import (
    DECODE_EFFICIENCY,
    MFU_DENSE,
    MFU_MOE,
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


@dataclass(frozen=True, slots=True)
class Work:
    """One rollout on average, tokens."""

    prompt: int
    response: int
    """Of a turn."""
    response_p99: int
    observation: int
    turns: float

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
    """None: the engine's speed was measured, or it runs elsewhere."""
    decode_tok_s: float
    """Of one sampling engine with `running` requests."""
    single_tok_s: float
    """Of one request alone on an engine."""
    running: float
    """Requests of one engine at a time."""
    mfu: float
    rollout_s: float
    train_s: float
    publish_s: float
    tail_s: float
    """Of the longest rollout alone."""
    step: StepTimes
    flight: InFlight

    @property
    def period_s(self) -> float:
        """Between two publishes of the schedule: sync or overlapped."""
        return self.step.sync


def work_of(case: Case) -> Work:
    """The workload, with what was left out."""
    given, algo = case.input.workload, case.input.algo
    turns = given.turns or float(algo.max_turns)
    response = given.response_tokens or max(1, algo.max_response // 2)
    room = case.max_context - turns * (response + given.observation_tokens)
    prompt = given.prompt_tokens or max(1, (algo.max_prompt or int(max(2, room))) // 2)
    return Work(prompt, response, given.response_p99 or algo.max_response, given.observation_tokens, turns)


def weight_bytes_sent(case: Case) -> float:
    """Bytes of a full publish."""
    per = case.decoding.weight_bytes if case.decoding else 2.0
    return case.parameters.total * per


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
        "gloo": hardware.nic_bw / 10,
        "disk": hardware.shared_fs_bw,
    }[transport(case)]


def times_of(case: Case) -> Times | None:
    """A step's times; None where neither the device nor measurements say anything."""
    if case.device is None or not case.train_gpus:
        return None
    work, measured = case.work, case.input.workload.measured
    running = max(1.0, case.running)
    step, tok_s, single = _decoding(case, running)
    waits = work.turns * case.input.workload.tool_s + case.input.workload.judge_s
    engines = case.decoding.count if case.decoding else max(1, len(case.input.rollout.urls))
    rollout_s = rollout_seconds(
        tokens=case.rollouts * case.input.algo.oversample * work.sampled,
        engines=engines,
        tok_s=tok_s,
        tail_tokens=work.tail,
        single_tok_s=single,
        waits_s=waits,
    )
    mfu = measured.mfu or (MFU_MOE if case.model.experts else MFU_DENSE)
    train_s = _training(case, mfu)
    publish_s = measured.publish_s or publish_seconds(
        weight_bytes_sent(case), publish_bandwidth(case), case.input.weights.t0_s
    )
    both = step_times(rollout_s, train_s, publish_s)
    overlaps = case.input.schedule.kind != "sync"
    flight = in_flight(
        rollouts=case.rollouts,
        period_s=both.overlapped if overlaps else both.sync,
        duration_s=work.sampled * running / tok_s + waits,
        staleness=max(0, case.staleness),
    )
    return Times(step, tok_s, single, running, mfu, rollout_s, train_s, publish_s, work.tail / single, both, flight)


def _decoding(case: Case, running: float) -> tuple[DecodeStep | None, float, float]:
    """A decoding step, tokens per second of an engine, and of a request alone on it."""
    measured = case.input.workload.measured
    engine, device, work = case.decoding, case.device, case.work
    assert device is not None
    if engine is None:
        tok_s = measured.decode_tok_s or 1000.0
        return None, tok_s, tok_s / running
    context = work.prompt + work.turns * (work.response + work.observation) / 2

    def at(batch: float) -> DecodeStep:
        return decode_step(
            case.model,
            gpus=engine.gpus,
            batch=batch,
            context=context,
            hbm=device.hbm,
            flops=device.flops,
            weight_bytes=engine.weight_bytes,
            kv_bits=engine.kv_bits,
            attention_tp=engine.attention_tp,
        )

    full, alone = at(running), at(1)
    tok_s = measured.decode_tok_s or running / full.seconds * DECODE_EFFICIENCY
    # A measured speed scales the request alone by as much as the batch.
    single = 1 / alone.seconds * DECODE_EFFICIENCY * (tok_s / (running / full.seconds * DECODE_EFFICIENCY))
    return full, tok_s, min(single, tok_s) if running >= 1 else single


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
