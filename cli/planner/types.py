"""What a plan is made of: rules, quantities, the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from palestra.envs.findings import Finding, Hit, Severity

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case

__all__ = ["Example", "Finding", "Grade", "Hit", "PlanReport", "Quantity", "Rule", "Severity"]


class Grade(StrEnum):
    """How far a quantity can be relied on."""

    EXACT = "exact"
    """Integer arithmetic on shapes."""
    ESTIMATE = "estimate"
    """A formula whose terms are known."""
    GUESS = "guess"
    """Depends on an efficiency that nobody measured yet; `Quantity.override` names the field for the measured one."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a plan, and where it comes from."""

    id: str
    """Stable: `train.gpu_bytes`."""
    value: float
    """In `unit`; bytes and seconds always."""
    unit: str
    """bytes, s, tokens, tokens/s, rollouts, 1."""
    formula: str
    """F4 and so on (docs/plan-formulas.md), and how it reads here."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What was put in."""
    grade: Grade = Grade.EXACT
    override: str | None = None
    """Of a guess: the field that takes a measured value."""


@dataclass(frozen=True, slots=True)
class Example:
    """A recipe with fields changed: what a rule refuses, or lets pass."""

    recipe: str
    """Name of a file in `recipes/`, without its ending."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Field path -> value; None takes the field away."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a plan is held to."""

    code: str
    severity: Severity
    path: str
    """Field that it is about."""
    title: str
    """One line: when it holds."""
    why: str
    """What happens otherwise, and how that is known (source)."""
    check: Callable[[Case], Iterable[Hit]]
    """Hits of a case; a rule whose `after` found something is not asked."""
    fails: Example
    passes: Example
    after: tuple[str, ...] = ()
    """Codes whose findings make this rule's inputs meaningless."""

    def findings(self, case: Case) -> Iterator[Finding]:
        """What it says of a case."""
        for hit in self.check(case):
            yield Finding(
                code=self.code,
                severity=hit.severity or self.severity,
                path=hit.path or self.path,
                message=hit.message,
                fix=hit.fix,
                suggest=hit.suggest,
            )


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan: same input, same bytes."""

    findings: tuple[Finding, ...]
    """By severity, code and path."""
    quantities: tuple[Quantity, ...]
    """Empty where the input could not be read."""
    advice: tuple[str, ...]
    """Where to put rollout and training, with the reasons."""
    not_built: tuple[str, ...]
    """Fields of this file that `palestra train` of this build refuses by name."""
    resolved: Mapping[str, Any]
    """The input with every default and derived field written out, by table."""
    derived: tuple[str, ...]
    """Paths of `resolved` that were computed rather than given or defaulted."""

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Findings of one severity."""
        return tuple(each for each in self.findings if each.severity is severity)
