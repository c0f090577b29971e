"""`plan`: a run's tables in, a report out. Same input, same bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.cli.planner.advice import advise
from palestra.cli.planner.case import Case, build
from palestra.cli.planner.dims import dims_of
from palestra.cli.planner.inputs import read
from palestra.cli.planner.quantities import quantities
from palestra.cli.planner.resolving import resolve
from palestra.cli.planner.rules import registry
from palestra.cli.planner.types import Finding, PlanReport


def plan(data: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> PlanReport:
    """The plan of a run.

    Args:
        data: the tables of a run's file, as plain values.
        model: dimensions that the model's own config.json gives, by the names of `[model]`.
    """
    case, findings, not_built, kept = case_of(data, model)
    if case is None:
        return PlanReport(findings, (), (), not_built, dict(data), ())

    # A section's validator and a rule may say the same.
    told = {(each.code, each.path): each for each in (*judge(case), *findings)}
    findings = tuple(sorted(told.values(), key=lambda each: each.order))
    resolved, derived = resolve(case, kept)
    return PlanReport(findings, quantities(case), advise(case), not_built, resolved, derived)


def case_of(
    data: Mapping[str, Any], model: Mapping[str, Any] | None = None
) -> tuple[Case | None, tuple[Finding, ...], tuple[str, ...], Mapping[str, Any]]:
    """What rules work on, where there is such; the findings of reading; what a run would refuse; what only a run reads."""
    reading = read(data)
    if reading.input is None:
        return None, reading.findings, reading.not_built, reading.kept
    dims, found = dims_of(reading.input.model, model)
    findings = (*reading.findings, *found)
    return build(reading.input, dims, findings), findings, reading.not_built, reading.kept


def judge(case: Case) -> Iterator[Finding]:
    """Findings of all rules; a rule whose inputs are known to be wrong is not asked."""
    holding: set[str] = set()
    waiting = dict(registry())
    while waiting:
        ready = [code for code, rule in waiting.items() if not any(code in waiting for code in rule.after)]
        if not ready:
            raise ValueError(f"rules wait for each other: {', '.join(waiting)}")
        for code in ready:
            rule = waiting.pop(code)
            if holding.isdisjoint(rule.after):
                found = list(rule.findings(case))
                if found:
                    holding.add(code)
                yield from found
