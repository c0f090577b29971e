"""Compares two evaluations on the same tasks, paired by task. Headers and rows go in, a `Comparison` comes out. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from palestra.agents.evaluation.stats import Estimate, Paired, estimate, grouped, paired
from palestra.agents.evaluation.summary import is_right
from palestra.agents.evaluation.types import EvalError, Header, Key, Row


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of both."""

    name: str
    first: Estimate
    second: Estimate
    difference: Paired
    """Second minus first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations side by side."""

    lines: tuple[Line, ...]
    """The reward first, then the share of right ones, then components that both have."""
    tasks: int
    left_out: int
    """Planned tasks without a scored episode in one of the two."""
    settings: tuple[tuple[str, str, str], ...]
    """Fields of the specs that differ: name, first, second."""
    better: int
    """Tasks whose mean reward is higher in the second."""
    worse: int


def compare(first: tuple[Header, Mapping[Key, Row]], second: tuple[Header, Mapping[Key, Row]]) -> Comparison:
    """The differences, second minus first.

    Raises:
        EvalError: they were played on different tasks.
    """
    (one, rows_one), (two, rows_two) = first, second
    if one.task_set != two.task_set:
        shared = len({task.hash for task in one.tasks} & {task.hash for task in two.tasks})
        raise EvalError(
            f"the two were played on different tasks (hash {one.task_set}: {len(one.tasks)} tasks; {two.task_set}: {len(two.tasks)}; "
            f"{shared} in both): a difference would say nothing. Play both with the same --tasks, -n, --order, --seed and --set"
        )
    names = [name for name in _names(rows_one) if name in _names(rows_two)]
    lines = [
        _line("reward", _rewards(rows_one), _rewards(rows_two)),
        _line("right", _rights(one, rows_one), _rights(two, rows_two)),
    ]
    lines += [_line(name, _parts(rows_one, name), _parts(rows_two, name)) for name in names]
    means = [_means(_rewards(rows)) for rows in (rows_one, rows_two)]
    common = [task for task in means[0] if task in means[1]]
    return Comparison(
        lines=tuple(lines),
        tasks=len(common),
        left_out=len(one.tasks) - len(common),
        settings=_settings(one, two),
        better=sum(means[1][task] > means[0][task] for task in common),
        worse=sum(means[1][task] < means[0][task] for task in common),
    )


Pairs = list[tuple[Hashable, float]]


def _line(name: str, first: Pairs, second: Pairs) -> Line:
    return Line(name, estimate(first), estimate(second), paired(_means(first), _means(second)))


def _means(pairs: Pairs) -> dict[Hashable, float]:
    return {task: statistics.fmean(values) for task, values in grouped(pairs).items()}


def _sorted(rows: Mapping[Key, Row]) -> list[Row]:
    """In an order that does not depend on which episode ended first."""
    return [rows[key] for key in sorted(rows)]


def _rewards(rows: Mapping[Key, Row]) -> Pairs:
    return [(row.task, value) for row in _sorted(rows) if (value := row.reward.value) is not None]


def _rights(header: Header, rows: Mapping[Key, Row]) -> Pairs:
    return [(row.task, float(is_right(header, row))) for row in _sorted(rows) if row.scored]


def _names(rows: Mapping[Key, Row]) -> dict[str, None]:
    return dict.fromkeys(name for row in _sorted(rows) if row.scored for name in row.reward.components)


def _parts(rows: Mapping[Key, Row], name: str) -> Pairs:
    return [
        (row.task, row.reward.components[name]) for row in _sorted(rows) if row.scored and name in row.reward.components
    ]  # fmt: skip


def _settings(one: Header, two: Header) -> tuple[tuple[str, str, str], ...]:
    names = type(one.spec).__dataclass_fields__
    both = [(name, str(getattr(one.spec, name)), str(getattr(two.spec, name))) for name in names]
    return tuple(entry for entry in both if entry[1] != entry[2])
