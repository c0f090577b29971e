"""Two plans side by side: fields, findings and numbers that differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.cli.planner.plain import plain_finding
from palestra.cli.planner.text import Line, amount, counted, table, written
from palestra.cli.planner.types import Finding, PlanReport

NONE = "-"
"""What is shown where one of the two has nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs; None: this side has it not."""

    name: str
    """A field's path or a quantity's id."""
    first: Any
    second: Any
    unit: str = ""
    """Of a quantity."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two plans."""

    fields: tuple[Change, ...]
    """Of their resolved tables."""
    quantities: tuple[Change, ...]
    gone: tuple[Finding, ...]
    """Findings that only the first has."""
    new: tuple[Finding, ...]
    """Findings that only the second has."""


def compare(first: PlanReport, second: PlanReport) -> Comparison:
    """What differs. Findings are the same where code and path are."""
    fields = _differing(dict(_flat(first.resolved)), dict(_flat(second.resolved)))
    units = {each.id: each.unit for each in (*first.quantities, *second.quantities)}
    values = [{each.id: each.value for each in report.quantities} for report in (first, second)]
    known = [{(each.code, each.path) for each in report.findings} for report in (first, second)]
    return Comparison(
        tuple(fields),
        tuple(Change(each.name, each.first, each.second, units[each.name]) for each in _differing(*values)),
        tuple(each for each in first.findings if (each.code, each.path) not in known[1]),
        tuple(each for each in second.findings if (each.code, each.path) not in known[0]),
    )


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield Change(name, first.get(name), second.get(name))


def _flat(tables: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def compare_lines(found: Comparison, first: tuple[str, PlanReport], second: tuple[str, PlanReport]) -> Iterator[Line]:
    """What differs, for people; each side with its name."""
    yield Line(f"A  {first[0]}: {counted(first[1])}")
    yield Line(f"B  {second[0]}: {counted(second[1])}")
    for title, findings in (("only in A", found.gone), ("only in B", found.new)):
        for each in findings:
            yield Line(f"  {title}: {each.code} {each.path}: {each.message}", str(each.severity))
    if found.fields:
        yield Line("")
        yield from table([["field", "A", "B", ""], *([each.name, *_sides(each), ""] for each in found.fields)])
    if found.quantities:
        yield Line("")
        rows = [[each.name, *_sides(each), _ratio(each)] for each in found.quantities]
        yield from table([["quantity", "A", "B", "B/A"], *rows])
    if not (found.fields or found.quantities or found.gone or found.new):
        yield Line("the two plans are the same")


def _sides(change: Change) -> tuple[str, str]:
    first, second = (
        NONE if value is None else amount(value, change.unit) if change.unit else written(value)
        for value in (change.first, change.second)
    )
    return first, second


def _ratio(change: Change) -> str:
    return f"{change.second / change.first:.3g}" if change.first and change.second is not None else ""


def plain_comparison(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON."""

    def sides(changes: tuple[Change, ...]) -> dict[str, Any]:
        return {each.name: [each.first, each.second] for each in changes}

    return {
        "fields": sides(found.fields),
        "quantities": sides(found.quantities),
        "gone": [plain_finding(each) for each in found.gone],
        "new": [plain_finding(each) for each in found.new],
    }
