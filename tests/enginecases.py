"""Cases of a plan, and what the rules of placement and engines say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.cli.planner.case import Case
from palestra.cli.planner.examples import data_of
from palestra.cli.planner.plan import case_of
from palestra.cli.planner.rules import engine_caches, engine_kinds, engine_requests, engines, placement, sharing
from palestra.cli.planner.types import Example, Finding

OWN = [
    *placement.RULES,
    *sharing.RULES,
    *engines.RULES,
    *engine_kinds.RULES,
    *engine_caches.RULES,
    *engine_requests.RULES,
]


def case(recipe: str, changes: Mapping[str, Any] | None = None) -> Case:
    """A recipe with fields changed."""
    made, findings, *_ = case_of(data_of(Example(recipe, changes or {})))
    assert made is not None, [each.message for each in findings]
    return made


def found(of: Case) -> list[Finding]:
    """What all rules of placement and engines say, those too that would wait for another's silence."""
    return [finding for rule in OWN for finding in rule.findings(of)]


def codes(of: Case) -> set[str]:
    """Their codes."""
    return {each.code for each in found(of)}


def only(of: Case, code: str) -> list[Finding]:
    """Those of one code."""
    return [each for each in found(of) if each.code == code]
