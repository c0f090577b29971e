"""From a run's file to what a plan works on.

In: the tables of a TOML file as plain values. Out: a `PlanInput`, the findings of reading it (P001, P002, P007), and the fields that this
build would refuse to run. A table is read twice: by the planner's own section, which knows every field of the specification, and by the
run's section, whose validators a run would be held to. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from palestra.agents.config import AgentConfig
from palestra.agents.evaluation.config import EvalConfig
from palestra.cli.planner.runsections import (
    PlanAlgo,
    PlanRollout,
    PlanRun,
    PlanSandbox,
    PlanSchedule,
    PlanWeights,
    PlanWorkload,
)
from palestra.cli.planner.sections import PlanHardware, PlanModel, PlanPlacement, PlanTrain
from palestra.cli.sections import ModelConfig, RunSection, check_backend, check_passed
from palestra.envs.config import EnvConfig, Section
from palestra.envs.findings import Finding, RefusedError, Severity
from palestra.envs.sandboxes import SandboxConfig
from palestra.server.config import BufferConfig, RolloutConfig, ScheduleConfig
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig
from palestra.trainer.megatron.passthrough import OWNED

NOT_BUILT = "not built: "
UNREAD = ("P001", "P002", "P003", "P004", "P005")
"""Findings after which there is nothing that rules could be asked about."""
RULED = ("schedule.deadline_s", "algo.temperature")
"""Fields whose ranges a rule holds to, under a code of its own."""
SMALLEST, LARGEST = 1e-9, 1e18
"""Of numbers in a file, zero apart."""
COUNTED: Mapping[str, int] = {
    "model.layers": 10_000,
    "hardware.nodes": 10_000,
    "hardware.gpus_per_node": 128,
    "placement.train_gpus": 1_000_000,
    "placement.rollout_gpus": 1_000_000,
    "placement.reference_gpus": 1_000_000,
    "rollout.pd.prefill_gpus": 1_000_000,
    "rollout.pd.decode_gpus": 1_000_000,
}
"""The most of what a plan goes through one by one: it answers at once whatever is written."""
PASSED = ("megatron", "sglang", "router")
"""Tables that go to the upstreams as they are."""
VERSION = 1
"""Of a file's form."""


class PlanInput(Section):
    """Everything that a plan is made from."""

    model: PlanModel = PlanModel()
    hardware: PlanHardware = PlanHardware()
    placement: PlanPlacement = PlanPlacement()
    train: PlanTrain = PlanTrain()
    rollout: PlanRollout = PlanRollout()
    algo: PlanAlgo = PlanAlgo()
    schedule: PlanSchedule = PlanSchedule()
    weights: PlanWeights = PlanWeights()
    workload: PlanWorkload = PlanWorkload()
    sandbox: PlanSandbox = PlanSandbox()
    run: PlanRun = PlanRun()


RUNS: Mapping[str, type[Section]] = {
    "model": ModelConfig,
    "env": EnvConfig,
    "run": RunSection,
    "agent": AgentConfig,
    "algo": AlgoConfig,
    "schedule": ScheduleConfig,
    "rollout": RolloutConfig,
    "buffer": BufferConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "weights": WeightsConfig,
    "sandbox": SandboxConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
}
"""Tables that a run has, and its sections for them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What became of a file."""

    input: PlanInput | None
    """None: findings say why there is none."""
    findings: tuple[Finding, ...]
    not_built: tuple[str, ...]
    """Fields, or fields with their values, that a run of this build refuses by name."""
    kept: Mapping[str, Any]
    """Tables and fields that only a run reads, as they were given."""


def read(data: Mapping[str, Any], whole: bool = True) -> Reading:
    """Reads the tables of a file. `whole`: they are all there are, so that what one needs of another is looked at too."""
    findings: list[Finding] = []
    not_built: list[str] = []
    planned: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for table, values in data.items():
        if table == "version":
            kept[table] = values
            if values != VERSION:
                findings.append(_bad(table, f"version = {values!r}: files have version = {VERSION}"))
        elif table in PASSED and isinstance(values, Mapping):
            kept[table] = values
            if table == "megatron":
                _owned(values, findings, not_built)
        elif table not in PlanInput.model_fields and table not in RUNS and table not in PASSED:
            findings.append(_unknown(table, [*PlanInput.model_fields, *RUNS, *PASSED]))
        elif not isinstance(values, Mapping):
            findings.append(_bad(table, f"{table} must be a table, got {values!r}"))
        else:
            ours, rest = _split(table, values, findings)
            if ours is not None:
                planned[table] = ours
            if rest:
                kept[table] = rest
            _as_a_run(table, values, findings, not_built)
    findings += _faults(planned)
    if whole:
        findings += passed_on(data)
    unread = any(each.code in UNREAD for each in findings)
    given = None if unread else PlanInput.model_validate(planned)
    return Reading(given, tuple(sorted(_once(findings), key=lambda each: each.order)), tuple(not_built), kept)


def passed_on(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Tables that are passed on, and nobody who gets them: a run refuses the same."""
    given = {table: data[table] for table in PASSED if isinstance(data.get(table), Mapping) and data[table]}
    if not given:
        return
    backend = _values(data, "train").get("backend", TrainConfig.model_fields["backend"].default)
    try:
        check_backend(given.get("megatron", {}), backend)
    except ValueError as error:
        yield _bad("megatron", str(error))
    values = _values(data, "rollout")
    if "engines" not in values and _values(data, "hardware").get("gpu", "cpu") != "cpu":
        # As many as the GPUs are enough for, which a plan takes for several.
        sources = ("pd", "urls", "topology")
        values = {**values, **({} if any(values.get(name) for name in sources) else {"engines": 2})}
    try:
        rollout = RolloutConfig.model_validate(
            {key: values[key] for key in RolloutConfig.model_fields if key in values}
        )
    except ValidationError:
        # Nobody can say who would get them; what is wrong with [rollout] is told, or is not built yet.
        return
    for table in ("sglang", "router"):
        try:
            check_passed(rollout, **{"sglang": {}, "router": {}, table: given.get(table, {})})
        except ValueError as error:
            yield _bad(table, str(error))


def _values(data: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    found = data.get(table)
    return found if isinstance(found, Mapping) else {}


def _owned(table: Mapping[str, Any], findings: list[Finding], not_built: list[str]) -> None:
    """Keys of `[megatron]` that other fields decide; which names megatron-core has is asked of the one that is installed."""
    for key in table:
        reason = OWNED.get(key, "")
        if reason.startswith(NOT_BUILT):
            not_built.append(f"megatron.{key}")
        elif reason:
            findings.append(_bad(f"megatron.{key}", f"megatron.{key} cannot be set here: {reason}"))


def _split(table: str, values: Mapping[str, Any], findings: list[Finding]) -> tuple[dict[str, Any] | None, Any]:
    """Fields that the planner reads, and those that only a run does; fields that nobody knows become findings."""
    ours = section_of(table)
    run = RUNS.get(table)
    mine = {} if ours is None else {key: value for key, value in values.items() if key in ours.model_fields}
    rest = {key: value for key, value in values.items() if key not in mine}
    names = [*(ours.model_fields if ours else ()), *(run.model_fields if run else ()), *(run.not_built if run else ())]
    for key in [key for key in rest if key not in names]:
        findings.append(_unknown(f"{table}.{key}", names, table))
        del rest[key]
    return (None if ours is None else _within_reason(table, mine, findings)), rest


def _within_reason(table: str, values: Mapping[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """The values without numbers that no machine has and that arithmetic would stumble over: they become findings."""
    found = dict(values)
    for key, value in values.items():
        path = f"{table}.{key}"
        if isinstance(value, Mapping):
            found[key] = _within_reason(path, value, findings)
        elif path not in RULED and _beyond(value, COUNTED.get(path, LARGEST)):
            findings.append(_bad(path, f"{path} = {repr(value)[:20]} is beyond reason"))
            del found[key]
    return found


def _beyond(value: Any, most: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and bool(value) and not SMALLEST <= abs(value) <= most


def section_of(table: str) -> type[Section] | None:
    """The planner's section of a table."""
    field = PlanInput.model_fields.get(table)
    return None if field is None or not isinstance(field.annotation, type) else field.annotation


def _as_a_run(table: str, values: Mapping[str, Any], findings: list[Finding], not_built: list[str]) -> None:
    """What the run's own section says of the fields that it has, and which it would refuse as not built."""
    run = RUNS.get(table)
    if run is None:
        if table == "placement" and values:
            not_built += [f"{table}.{key}" for key in values]
        return
    not_built += [f"{table}.{key}" for key in sorted(run.not_built & values.keys())]
    ours = section_of(table)
    only_planned = set() if ours is None else ours.model_fields.keys() - run.model_fields.keys() - run.not_built
    not_built += [f"{table}.{key}" for key in sorted(only_planned & values.keys())]
    for _, fault in _run_faults(run, {key: value for key, value in values.items() if key in run.model_fields}):
        message = str(fault["msg"]).removeprefix("Value error, ")
        path = ".".join((table, *map(str, fault["loc"])))
        refused = fault.get("ctx", {}).get("error")
        if isinstance(refused, RefusedError):
            findings.append(refused.finding)
            continue
        if path in RULED:
            continue
        if message.startswith(NOT_BUILT):
            not_built.append(message.removeprefix(NOT_BUILT).partition(";")[0])
        elif fault["type"] in ("literal_error", "missing") and ours is not None:
            # A value that only the planner knows yet; what it does not know either, its own section says.
            if fault["type"] == "literal_error":
                not_built.append(f"{path} = {fault['input']!r}")
        elif fault["type"] != "value_error" or ours is None or path != table:
            findings.append(_bad(path, f"{path}: {message}, got {fault['input']!r}"))
        else:
            findings.append(_bad(path, message))


def _run_faults(run: type[Section], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        run.model_validate(dict(values))
    except ValidationError as error:
        for fault in error.errors():
            yield fault["type"], fault


def _faults(planned: Mapping[str, Any]) -> Iterator[Finding]:
    """What the planner's sections refuse: types and ranges."""
    try:
        PlanInput.model_validate(planned)
    except ValidationError as error:
        for fault in error.errors():
            path = ".".join(map(str, fault["loc"]))
            if fault["type"] == "extra_forbidden":
                above = planned
                yield _unknown(path, list(above))
            else:
                yield _bad(path, f"{path}: {str(fault['msg']).removeprefix('Value error, ')}, got {fault['input']!r}")


def _once(findings: list[Finding]) -> list[Finding]:
    """One finding a code and path: both sections may refuse the same value."""
    kept: dict[tuple[str, str], Finding] = {}
    for each in findings:
        kept.setdefault((each.code, each.path), each)
    return list(kept.values())


def _unknown(path: str, names: list[str], table: str = "") -> Finding:
    close = difflib.get_close_matches(path.rpartition(".")[2], names, n=1)
    full = f"{table}.{close[0]}" if table and close else close[0] if close else ""
    message = f"unknown field {path}" + (f"; did you mean {full}?" if full else "")
    return Finding("P001", Severity.ERROR, path, message, fix=f"write {full}" if full else "remove it")


def _bad(path: str, message: str) -> Finding:
    return Finding("P002", Severity.ERROR, path, message, fix="give a value of this kind")
