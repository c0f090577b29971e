"""A report as plain values: what `palestra plan --json` prints and what `plan.json` of an export holds. Pure.

In: a report. Out: dicts, lists, texts and numbers, in an order that depends on nothing but the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from palestra.cli.planner.types import Finding, PlanReport, Quantity


def plain(report: PlanReport) -> dict[str, Any]:
    """The whole report."""
    return {
        "findings": [plain_finding(each) for each in report.findings],
        "quantities": [plain_quantity(each) for each in report.quantities],
        "advice": list(report.advice),
        "not_built": list(report.not_built),
        "resolved": dict(report.resolved),
        "derived": list(report.derived),
    }


def plain_finding(finding: Finding) -> dict[str, Any]:
    """One finding; `suggest` only where there is one."""
    told: dict[str, Any] = {
        "code": finding.code,
        "severity": str(finding.severity),
        "path": finding.path,
        "message": finding.message,
        "fix": finding.fix,
    }
    if finding.suggest:
        told["suggest"] = dict(finding.suggest)
    return told


def plain_quantity(quantity: Quantity) -> dict[str, Any]:
    """One number with where it comes from; `override` only of a guess."""
    told: dict[str, Any] = {
        "id": quantity.id,
        "value": quantity.value,
        "unit": quantity.unit,
        "grade": str(quantity.grade),
        "formula": quantity.formula,
        "terms": dict(quantity.terms),
    }
    if quantity.override:
        told["override"] = quantity.override
    return told


def dumped(value: Any) -> str:
    """JSON that is the same for the same value; what JSON has not (infinity, dates of a TOML file) becomes a text."""
    return json.dumps(_sayable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _sayable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    return str(value)
