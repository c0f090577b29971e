"""What several families of rules ask of a case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from palestra.cli.planner.case import Case
from palestra.cli.planner.workload import Times
from palestra.envs.findings import Finding, Hit


def hits(findings: Iterable[Finding], code: str) -> Iterator[Hit]:
    """Those of a section's own checks that have this code."""
    for each in findings:
        if each.code == code:
            yield Hit(each.message, each.fix, each.suggest, each.path, each.severity)


def told(case: Case, *fields: str) -> bool:
    """Whether `[workload]` gives all of these: a default says nothing of what rollouts are like."""
    return set(fields) <= case.input.workload.model_fields_set


def timed(case: Case) -> Times | None:
    """The times of a step where they rest on a known GPU or on measurements; None: on guesses of guesses."""
    measured = case.input.workload.measured
    if case.on_cpu and (measured.decode_tok_s is None or measured.train_tok_s is None):
        return None
    return case.times


def waits_s(case: Case) -> float:
    """Seconds that one rollout waits for tools and judges."""
    return case.work.turns * case.input.workload.tool_s + case.input.workload.judge_s


def longest_s(case: Case, times: Times) -> float:
    """Seconds of a long rollout (p99) beside the others of its engine, which samples all of them at one speed together."""
    return case.work.tail * min(times.running, max(1.0, case.running)) / times.decode_tok_s + waits_s(case)


def fits_with(case: Case, table: str, **changes: Any) -> bool:
    """Whether the fullest GPU of training still holds everything with these fields of a table; where its memory is unknown, yes."""
    changed = getattr(case.input, table).model_copy(update=changes)
    other = Case(case.input.model_copy(update={table: changed}), case.model)
    return not (case.device and case.device.memory_bytes) or other.worst_train_bytes <= case.device.memory_bytes
