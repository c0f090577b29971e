"""Puts into a hit the first of a few changes that removes it and adds no error, which is found by asking all rules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from palestra.cli.planner.case import Case
from palestra.cli.planner.fitting import Changes, Trial, first
from palestra.cli.planner.plan import judge
from palestra.envs.findings import Hit
from palestra.trainer.layout.types import Layout


def mended(case: Case, check: Callable[[Case], Iterable[Hit]], hit: Hit, tries: Iterable[Changes]) -> Hit:
    """The hit with the change that works, or as it is where none does, and in a case that is a trial itself. `check`: the rule."""
    if isinstance(case, Trial):
        return hit

    def gone(trial: Case) -> bool:
        return all(each.path != hit.path for each in check(trial))

    return replace(hit, suggest=first(case, tries, gone, judge))


def ranks(case: Case) -> Layout:
    """The layout of training; without GPUs at least one process trains."""
    return replace(case.layout, gpus=1) if case.on_cpu and not case.layout.gpus else case.layout
