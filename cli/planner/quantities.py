"""The numbers of a plan, each with its formula, its terms and how far it can be relied on. Pure.

Here: the model, batches, schedule, disk. Memory is in `amounts.py`, times are in `speeds.py`. What does not apply to a case is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from palestra.cli.planner.amounts import engine_amounts, train_amounts
from palestra.cli.planner.case import Case
from palestra.cli.planner.flow import group_prefix, groups_to_submit, turn_prefix
from palestra.cli.planner.memory import checkpoint_bytes, kept_checkpoint_bytes, record_bytes_per_token
from palestra.cli.planner.speeds import of_schedule, of_serving, of_step, of_weights
from palestra.cli.planner.stating import estimate, exact
from palestra.cli.planner.types import Quantity


def quantities(case: Case) -> tuple[Quantity, ...]:
    """All of them, in the order in which they are shown."""
    parts = (
        _of_model,
        _of_layout,
        train_amounts,
        engine_amounts,
        of_step,
        of_schedule,
        of_weights,
        of_serving,
        _of_batch,
        _of_boxes,
        _of_disk,
    )
    return tuple(each for part in parts for each in part(case) if isfinite(each.value))


def _of_model(case: Case) -> Iterator[Quantity]:
    counted, model = case.parameters, case.model
    shapes = {"layers": model.layers, "hidden": model.hidden, "vocab": model.vocab, "experts": model.experts}
    yield exact("model.parameters", counted.total, "1", "F1: parameters of all layers, embedding and head", **shapes)
    yield exact(
        "model.active_parameters",
        counted.active,
        "1",
        "F1: total - moe_layers * (experts - topk) * 3 * hidden * moe_ffn",
        total=counted.total,
        moe_layers=model.moe_layers,
        experts=model.experts,
        topk=model.topk,
        hidden=model.hidden,
        moe_ffn=model.moe_ffn,
    )
    if counted.routed:
        yield exact(
            "model.routed_parameters",
            counted.routed,
            "1",
            "F1: moe_layers * experts * 3 * hidden * moe_ffn",
            moe_layers=model.moe_layers,
            experts=model.experts,
            hidden=model.hidden,
            moe_ffn=model.moe_ffn,
        )


def _of_layout(case: Case) -> Iterator[Quantity]:
    layout = case.layout
    terms = {"gpus": layout.gpus, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    yield exact("train.dp", layout.dp, "1", "gpus / (tp * pp * cp)", **terms)
    if case.model.experts:
        terms = {"gpus": layout.gpus, "etp": layout.etp, "ep": layout.ep, "pp": layout.pp}
        yield exact("train.edp", layout.edp, "1", "gpus / (etp * ep * pp)", **terms)
    tokens = case.global_batch * case.work.row_tokens
    yield estimate(
        "train.step_tokens",
        tokens,
        "tokens",
        "rollouts of an optimizer step * tokens of a mean row",
        rollouts=case.global_batch,
        row=case.work.row_tokens,
    )
    yield estimate(
        "train.microbatches",
        case.microbatches,
        "1",
        "of an optimizer step on one rank: tokens / dp / (max_tokens_per_gpu * cp), rounded up",
        tokens=tokens,
        dp=layout.dp,
        max_tokens_per_gpu=case.max_tokens_per_gpu,
        cp=layout.cp,
    )


def _of_batch(case: Case) -> Iterator[Quantity]:
    algo, work = case.input.algo, case.work
    yield exact(
        "algo.rollouts",
        case.rollouts,
        "rollouts",
        "groups_per_step * group_size",
        groups=algo.groups_per_step,
        group_size=algo.group_size,
    )
    group = group_prefix(algo.group_size, work.prompt, work.response)
    yield estimate("rollout.group_hit", group.hit, "1", "F14: (G - 1) / G of prompts", G=algo.group_size)
    turns = turn_prefix(work.prompt, work.response, work.observation, work.turns)
    if work.turns > 1:
        yield estimate(
            "rollout.turn_hit",
            turns.hit,
            "1",
            "F14: 1 - new / all prompt tokens of a conversation's turns",
            new=turns.new_tokens,
            all=turns.prompt_tokens,
            turns=work.turns,
        )
    if algo.drop_zero_variance:
        wasted = case.zero_variance
        terms = {"p": case.input.workload.success_rate, "G": algo.group_size}
        yield estimate("algo.zero_variance", wasted, "1", "F15: p**G + (1 - p)**G", **terms)
        yield estimate(
            "algo.groups_to_submit",
            groups_to_submit(algo.groups_per_step, wasted),
            "1",
            "F15: groups_per_step / (1 - zero_variance)",
            groups_per_step=algo.groups_per_step,
            zero_variance=wasted,
        )


def _of_boxes(case: Case) -> Iterator[Quantity]:
    if case.boxes is not None:
        yield estimate(
            "sandbox.boxes",
            case.boxes.needed,
            "1",
            "F16: boxes made per second * (create + busy + destroy)",
            rate=case.boxes.rate,
            create_s=case.boxes.create_s,
            busy_s=case.boxes.busy_s,
            destroy_s=case.boxes.destroy_s,
        )


def _of_disk(case: Case) -> Iterator[Quantity]:
    one, keep = checkpoint_bytes(case.model), case.input.run.keep_checkpoints
    total = case.parameters.total
    yield exact("run.checkpoint_bytes", one, "bytes", "F17: 14 bytes a parameter", parameters=total)
    yield exact(
        "run.kept_bytes", kept_checkpoint_bytes(one, keep), "bytes", "F17: checkpoint * (keep + 1)", one=one, keep=keep
    )
    replayed = case.input.train.router_replay == "rollout"
    token = record_bytes_per_token(case.model, replayed)
    yield exact(
        "run.record_bytes_per_token",
        token,
        "bytes",
        "F17: id and logprob, and with routing replay moe_layers * topk * 4",
        moe_layers=case.model.moe_layers,
        topk=case.model.topk,
        replayed=int(replayed),
    )
    yield estimate(
        "run.record_bytes_per_step",
        token * case.work.row_tokens * case.rollouts,
        "bytes",
        "F17: bytes per token * tokens of a mean row * rollouts",
        per_token=token,
        row=case.work.row_tokens,
        rollouts=case.rollouts,
    )
