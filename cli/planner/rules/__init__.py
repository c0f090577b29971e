"""All rules, by family. A rule is a function of a `Case`; what it is about lives beside the section that it is about, where that can be."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from palestra.cli.planner.types import Rule

FAMILIES = (
    "reading",
    "model",
    "layout",
    "layout_pipeline",
    "layout_megatron",
    "placement",
    "sharing",
    "engines",
    "engine_kinds",
    "engine_caches",
    "engine_requests",
    "schedule",
    "freshness",
    "weights",
    "delta",
    "batch",
    "sampling",
    "memory",
    "pools",
    "services",
)
"""Modules of this package; each has `RULES`."""


@cache
def registry() -> Mapping[str, Rule]:
    """Code -> rule, in the order of codes.

    Raises:
        ValueError: two rules have one code, or one waits for a code that nobody has.
    """
    found: dict[str, Rule] = {}
    for family in FAMILIES:
        for rule in importlib.import_module(f"palestra.cli.planner.rules.{family}").RULES:
            if rule.code in found:
                raise ValueError(f"two rules have the code {rule.code}")
            found[rule.code] = rule
    for rule in found.values():
        if lacking := [code for code in rule.after if code not in found]:
            raise ValueError(f"{rule.code} comes after {lacking[0]}, which no rule has")
    return dict(sorted(found.items()))
