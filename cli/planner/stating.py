"""How numbers of a plan are stated: a value with its formula, its terms and its grade."""

from __future__ import annotations

from palestra.cli.planner.types import Grade, Quantity


def exact(name: str, value: float, unit: str, formula: str, **terms: float) -> Quantity:
    """Integer arithmetic on shapes."""
    return Quantity(name, value, unit, formula, terms)


def estimate(name: str, value: float, unit: str, formula: str, **terms: float) -> Quantity:
    """A formula whose terms are known."""
    return Quantity(name, value, unit, formula, terms, Grade.ESTIMATE)


def guess(name: str, value: float, unit: str, formula: str, override: str | None, **terms: float) -> Quantity:
    """Rests on what nobody measured; where that was measured (`override` is None) it is an estimate."""
    if override is None:
        return estimate(name, value, unit, formula, **terms)
    return Quantity(name, value, unit, formula, terms, Grade.GUESS, override)
