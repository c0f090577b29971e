"""The input with every default and derived field written out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.cli.planner.boxes import backend_of
from palestra.cli.planner.case import Case
from palestra.cli.planner.engines import mem_fraction, weight_dtype
from palestra.cli.planner.inputs import PlanInput
from palestra.cli.planner.workload import transport
from palestra.server.enginerules import ONLY_SGLANG

OF_STATES = ("ssm_dtype", "conv_dtype", "state_ratio", "state_slots_pin", "state_strategy")
"""Fields of `[rollout]` about the states of linear attention."""


def resolve(case: Case, kept: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Tables with all their fields, and the paths of those that were computed. What is unknown (None) is left out.

    `kept`: tables and fields that only a run reads; they stay as they are.
    """
    tables: dict[str, Any] = case.input.model_dump(mode="json", exclude_none=True)
    # What rollouts are like is either said or not known: a default that is written out would read like a statement.
    tables["workload"] = case.input.workload.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    idle = _idle(case)
    for name in idle - case.input.rollout.model_fields_set:
        tables["rollout"].pop(name, None)
    derived = []
    for path, value in _derived(case):
        table, _, key = path.partition(".")
        if key not in tables[table] and value is not None and not (table == "rollout" and key in idle):
            tables[table][key] = value
            derived.append(path)
    for table, values in kept.items():
        tables[table] = {**tables.get(table, {}), **values} if isinstance(values, Mapping) else values
    order = [*PlanInput.model_fields, *(name for name in tables if name not in PlanInput.model_fields)]
    return {name: tables[name] for name in order if tables.get(name) not in (None, {})}, tuple(derived)


def _idle(case: Case) -> set[str]:
    """Fields of `[rollout]` that this case's engines have no use for: a run refuses them, or would pass them on for nothing."""
    rollout = case.input.rollout
    idle = set(ONLY_SGLANG) if rollout.engine == "embedded" else set()
    if not case.model.linear_layers:
        idle |= set(OF_STATES)
    return idle | ({"state_ratio"} if rollout.state_slots_pin is not None else set())


def _derived(case: Case) -> Iterator[tuple[str, Any]]:
    yield "placement.mode", case.mode
    yield "placement.train_gpus", None if case.on_cpu else case.train_gpus
    yield "placement.rollout_gpus", None if case.on_cpu else case.rollout_gpus
    yield "placement.offload_train", case.offload_train
    yield "placement.offload_rollout", case.offload_rollout
    yield "train.sp", case.sp
    yield "train.dtype", case.train_dtype
    yield "train.recompute", case.recompute
    yield "train.grouped_gemm", case.grouped_gemm
    yield "train.max_tokens_per_gpu", case.max_tokens_per_gpu
    yield "rollout.weight_dtype", weight_dtype(case)
    yield "rollout.deterministic", case.deterministic_engine
    yield "rollout.memory_saver", case.memory_saver
    if not case.on_cpu and case.engines:
        yield "rollout.mem_fraction", mem_fraction(case)
    yield "algo.max_context", case.max_context
    # What is left out and what is "none" are the same, and a run refuses the bounds of a correction that is named as none.
    yield "algo.ratio_correction", None if case.ratio_correction == "none" else case.ratio_correction
    yield "schedule.publish_every", case.publish_every
    yield "weights.transport", transport(case)
    yield "sandbox.backend", backend_of(case)
