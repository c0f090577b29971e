"""Times of a plan as quantities: a step, the schedule, a publish, what engines let through. Pure.

A number that rests on what nobody measured is a guess, and names the field that takes the measured value.
"""

from __future__ import annotations

from collections.abc import Iterator

from palestra.cli.planner.case import Case
from palestra.cli.planner.serving import siblings_meet
from palestra.cli.planner.stating import estimate, exact, guess
from palestra.cli.planner.types import Quantity
from palestra.cli.planner.workload import Times, publish_bandwidth

MEASURED = "workload.measured"


def unmeasured(case: Case, *fields: str) -> str | None:
    """The field that takes a measured value: the first of `fields`; None where one of them was given."""
    given = case.input.workload.measured
    if any(getattr(given, field) is not None for field in fields):
        return None
    return f"{MEASURED}.{fields[0]}"


def assumed(case: Case, field: str) -> str | None:
    """`hardware.FIELD`, where it is as it would be if nothing had been said of it; None: it was given."""
    default = type(case.input.hardware).model_fields[field].default
    return f"hardware.{field}" if getattr(case.input.hardware, field) == default else None


def of_step(case: Case) -> Iterator[Quantity]:
    """F7 to F10."""
    times = case.times
    if times is None:
        return
    yield from _decoding(case, times)
    sampling, training = unmeasured(case, "decode_tok_s"), unmeasured(case, "train_tok_s", "mfu")
    publishing = unmeasured(case, "publish_s")
    yield guess(
        "time.rollout_s",
        times.rollout_s,
        "s",
        "F7: max(sampled / (engines * tok_s), tail / tok_s of one alone) + tools and judge",
        sampling,
        sampled=case.rollouts * case.input.algo.oversample * case.work.sampled,
        engines=case.sampling_engines,
        tok_s=times.decode_tok_s,
        tail=case.work.tail,
        alone=times.single_tok_s,
        waits=case.work.waits_s,
    )
    terms = {"tail": case.work.tail, "alone": times.single_tok_s}
    yield guess("time.tail_s", times.tail_s, "s", "F7: tail / tok_s of one alone", sampling, **terms)
    yield _training(case, times, training)
    yield guess(
        "time.publish_s",
        times.publish_s,
        "s",
        "F9: bytes / bandwidth + t0" if case.input.weights.mode == "full" else "F9: find, write and apply changes + t0",
        publishing,
        bytes=case.sent_bytes,
        bandwidth=publish_bandwidth(case),
        t0=case.input.weights.t0_s,
    )
    lacking = next((each for each in (sampling, training, publishing) if each), None)
    parts = {"rollout": times.rollout_s, "train": times.train_s, "publish": times.publish_s}
    yield guess("time.sync_s", times.step.sync, "s", "F10: rollout + train + publish", lacking, **parts)
    yield guess(
        "time.async_s", times.step.overlapped, "s", "F10: max(rollout, train) + publish, at best", lacking, **parts
    )
    yield guess("time.speedup", times.step.speedup, "1", "F10: sync / async, at best", lacking, **parts)
    if case.colocated:
        moved = case.swapped_bytes
        terms = {"moved": moved, "pcie": case.input.hardware.pcie_bw}
        formula = "bytes that leave a GPU and come back, a step / pcie"
        yield guess("time.swap_s", case.swap_s, "s", formula, assumed(case, "pcie_bw"), **terms)


def _decoding(case: Case, times: Times) -> Iterator[Quantity]:
    lacking = unmeasured(case, "decode_tok_s")
    if times.decode is not None and case.device is not None:
        terms = {"hbm": case.device.hbm, "flops": case.device.flops}
        yield estimate(
            "engine.decode_step_s",
            times.decode.seconds,
            "s",
            "F7: max((weights that are touched + caches of the batch) / hbm, 2 * active * batch / (gpus * flops))",
            batch=times.running,
            memory=times.decode.memory_s,
            compute=times.decode.compute_s,
            **terms,
        )
        formula = "F7: batch / step * efficiency" if lacking else "as it was measured"
        terms = {"batch": times.running, "step": times.decode.seconds}
        yield guess("engine.decode_tok_s", times.decode_tok_s, "tokens/s", formula, lacking, **terms)
    else:
        yield guess("engine.decode_tok_s", times.decode_tok_s, "tokens/s", "of an engine elsewhere", lacking)


def _training(case: Case, times: Times, lacking: str | None) -> Quantity:
    tokens = case.rollouts * case.work.row_tokens
    if case.input.workload.measured.train_tok_s:
        terms = {"tokens": tokens, "tok_s": case.input.workload.measured.train_tok_s, "gpus": case.train_gpus}
        return estimate("time.train_s", times.train_s, "s", "tokens / (tok_s * gpus)", **terms)
    return guess(
        "time.train_s",
        times.train_s,
        "s",
        "F8: tokens * (6 * active * 4/3 with full recomputation + 2 * active * extra forwards) / (gpus * flops * mfu) * (1 + bubble)",
        lacking,
        tokens=tokens,
        active=case.parameters.active,
        gpus=case.train_gpus,
        flops=case.device.flops if case.device else 0.0,
        mfu=times.mfu,
        pp=case.layout.pp,
        microbatches=case.microbatches,
        vpp=case.layout.vpp,
    )


def of_schedule(case: Case) -> Iterator[Quantity]:
    """F11."""
    times = case.times
    if case.staleness >= 0:
        yield exact("schedule.staleness", case.staleness, "steps", "the bound in force, train steps")
    if times is None:
        return
    lacking = unmeasured(case, "decode_tok_s")
    flight, rollouts = times.flight, case.rollouts
    terms = {"rollouts": rollouts, "period": times.period_s}
    yield guess(
        "schedule.in_flight", flight.demand, "rollouts", "F11: rollouts / period * a rollout's time", lacking, **terms
    )
    yield exact(
        "schedule.in_flight_cap",
        flight.cap,
        "rollouts",
        "F11: (staleness + 1) * rollouts of a batch",
        staleness=max(0, case.staleness),
        rollouts=rollouts,
    )
    idle = {"in_flight": flight.demand, "cap": flight.cap}
    yield guess("schedule.idle", flight.idle, "1", "F11: 1 - cap / in_flight, at least 0", lacking, **idle)
    yield guess("schedule.versions", flight.versions, "1", "F11: 1 + a rollout's time / period", lacking, **terms)


def of_weights(case: Case) -> Iterator[Quantity]:
    """F9: what is sent, and what a publish of changes would take."""
    yield exact(
        "weights.bytes",
        case.sent_bytes,
        "bytes",
        "F9: parameters * bytes of a weight in the engine",
        parameters=case.parameters.total,
    )
    lacking = unmeasured(case, "delta_density")
    terms = {"bytes": case.sent_bytes, "disk": case.input.hardware.shared_fs_bw, "t0": case.input.weights.t0_s}
    override = assumed(case, "shared_fs_bw")
    yield guess("weights.full_s", case.delta.full_s, "s", "F9: bytes / disk + t0", override, **terms)
    yield guess(
        "weights.delta_s",
        case.delta.delta_s,
        "s",
        "F9: bytes / diff rate + density * bytes / disk + bytes / apply rate + t0",
        lacking or override,
        **terms,
    )
    yield guess(
        "weights.break_even",
        case.delta.break_even,
        "1",
        "F9: 1 - disk * (1 / diff rate + 1 / apply rate): changed share at which both take as long",
        override,
        **terms,
    )


def of_serving(case: Case) -> Iterator[Quantity]:
    """F12 and F13, where prompts and completions are apart, and where there is a second cache."""
    flow = case.pd_flow
    if flow is not None:
        lacking = next(
            (each for name in ("prefill_tok_s", "decode_tok_s", "kv_bw") if (each := unmeasured(case, name))), None
        )
        terms = {"prefill": flow.prefill * flow.prefill_rate, "decode": flow.decode * flow.decode_rate}
        yield guess(
            "rollout.pd_rate",
            flow.rate,
            "rollouts/s",
            "F12: min(prefill, decode, bandwidth / bytes of a rollout's cache)",
            lacking,
            **terms,
            bandwidth=flow.kv_bandwidth,
            bytes=flow.kv_bytes,
            siblings_meet=int(siblings_meet(case)),
        )
        if flow.best_prefill is not None:
            engines = {"engines": flow.prefill + flow.decode}
            formula = "F12: prefill engines at which the fewer of both rates is highest"
            yield guess("rollout.pd_best_prefill", flow.best_prefill, "1", formula, lacking, **engines)
            formula = "F12: at the best split, the link not counted"
            yield guess("rollout.pd_best_rate", flow.best_rate, "rollouts/s", formula, lacking, **engines)
    second = case.second_cache
    if second is not None:
        yield guess(
            "rollout.hicache_saved_s",
            second.saved_s,
            "s",
            "F13: hit * prefill - io - bookkeeping, of one request",
            unmeasured(case, "prefix_hit"),
            hit=second.hit,
            prefill=second.prefill_s,
            io=second.io_s,
        )
