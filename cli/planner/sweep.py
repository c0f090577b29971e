"""Many plans at once: every combination of some fields' values. Pure.

In: a run's tables and the values that fields take. Out: a row per combination, the quickest first and the refused ones last. Quantities,
advice and resolved tables are not made, and rules that find no errors are not asked: rows take their numbers from the case itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf, prod
from typing import Any

from palestra.cli.planner.case import Case
from palestra.cli.planner.dims import dims_of
from palestra.cli.planner.examples import changed
from palestra.cli.planner.fitting import Trial
from palestra.cli.planner.inputs import PASSED, PlanInput, Reading, passed_on, read
from palestra.cli.planner.rules import registry
from palestra.cli.planner.text import Line, amount, table, written
from palestra.cli.planner.types import Finding, Rule, Severity
from palestra.trainer.layout.types import ModelDims

MOST_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One combination. Numbers are None where the plan has none."""

    values: Mapping[str, Any]
    """Field path -> its value here."""
    errors: tuple[str, ...]
    """Codes, in the order in which they are listed; empty: it is not refused."""
    gpu_bytes: float | None = None
    """Of the fullest training GPU."""
    kv_tokens: int | None = None
    """That fit in one sampling engine at a time."""
    sync_s: float | None = None
    async_s: float | None = None
    """The least that a step takes where rollout and training overlap."""
    step_s: float = inf
    """Of the schedule that this combination has; infinite where nothing says it."""

    @property
    def speedup(self) -> float | None:
        """Of overlapping, at most."""
        return self.sync_s / self.async_s if self.sync_s and self.async_s else None

    @property
    def order(self) -> tuple[bool, float]:
        """What is refused comes last, the quickest first."""
        return bool(self.errors), self.step_s


def sweep(
    data: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], model: Mapping[str, Any] | None = None
) -> tuple[Row, ...]:
    """A row per combination of `axes` (field path -> its values).

    Raises:
        ValueError: there is nothing to combine, or too much.
    """
    if not axes or not all(axes.values()):
        raise ValueError("a sweep needs fields with values: --sweep train.tp=1,2,4")
    count = prod(len(values) for values in axes.values())
    if count > MOST_ROWS:
        raise ValueError(f"a sweep of {count:,} combinations; {MOST_ROWS:,} are the most")
    rows = list(_Rows(data, axes, model))
    return tuple(sorted(rows, key=lambda row: row.order))


class _Rows:
    """The rows, in the order of their values. A table is read once for each of its own contents: that is most of what a plan costs."""

    def __init__(
        self, data: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], model: Mapping[str, Any] | None
    ) -> None:
        self._data, self._axes, self._model = data, axes, model
        self._touched: dict[str, list[str]] = {}
        for path in axes:
            self._touched.setdefault(path.partition(".")[0], []).append(path)
        self._rest = read({name: values for name, values in data.items() if name not in self._touched}, whole=False)
        self._passes = any(name in data or name in self._touched for name in PASSED)
        self._read: dict[tuple[str, tuple[int, ...]], Reading] = {}
        self._dims: dict[tuple[int, ...], tuple[ModelDims | None, tuple[Finding, ...]]] = {}

    def __iter__(self) -> Iterator[Row]:
        for chosen in product(*(range(len(values)) for values in self._axes.values())):
            yield self._row(dict(zip(self._axes, chosen, strict=True)))

    def _row(self, at: Mapping[str, int]) -> Row:
        """`at`: where in its values each axis is."""
        values = {path: self._axes[path][index] for path, index in at.items()}
        parts = [self._rest, *(self._part(name, values, at) for name in self._touched)]
        found = [each for part in parts for each in part.findings]
        # What one table needs of another; it costs a copy of all of them, so only where there are such.
        apart = list(passed_on(changed(self._data, values))) if self._passes else []
        found += apart
        given = _joined([part.input for part in parts if part.input is not None])
        case = None
        if not apart and all(part.input is not None for part in parts):
            dims, lacking = self._dims_of(given, at)
            found += lacking
            # A row shows no suggestion, so rules need not search for one.
            case = None if dims is None else Trial(given, dims)
        holding = {each.code for each in found if each.severity is Severity.ERROR}
        if case is None:
            return Row(values, tuple(sorted(holding)))
        return _of(case, values, tuple(sorted(holding | _errors(case))))

    def _part(self, name: str, values: Mapping[str, Any], at: Mapping[str, int]) -> Reading:
        """One table that axes touch."""
        own = self._touched[name]
        key = name, tuple(at[path] for path in own)
        if key not in self._read:
            tables = {name: self._data[name]} if name in self._data else {}
            self._read[key] = read(changed(tables, {path: values[path] for path in own}), whole=False)
        return self._read[key]

    def _dims_of(self, given: PlanInput, at: Mapping[str, int]) -> tuple[ModelDims | None, tuple[Finding, ...]]:
        key = tuple(at[path] for path in self._touched.get("model", ()))
        if key not in self._dims:
            self._dims[key] = dims_of(given.model, self._model)
        return self._dims[key]


def _joined(parts: Sequence[PlanInput]) -> PlanInput:
    """One input of the tables that each part was given."""
    tables = {name: getattr(part, name) for part in parts for name in part.model_fields_set}
    return PlanInput().model_copy(update=tables)


def _errors(case: Case) -> set[str]:
    """Codes of the errors of a case."""
    holding: set[str] = set()
    errors: set[str] = set()
    for rule in _asked():
        if holding.isdisjoint(rule.after):
            found = list(rule.check(case))
            if found:
                holding.add(rule.code)
            if any((each.severity or rule.severity) is Severity.ERROR for each in found):
                errors.add(rule.code)
    return errors


@cache
def _asked() -> tuple[Rule, ...]:
    """Rules that find errors, and those that they come after, each after the ones that it waits for."""
    known = registry()
    ordered: dict[str, Rule] = {}

    def put(code: str) -> None:
        for before in known[code].after:
            put(before)
        ordered[code] = known[code]

    for code, rule in known.items():
        if rule.severity is Severity.ERROR:
            put(code)
    return tuple(ordered.values())


def _of(case: Case, values: Mapping[str, Any], codes: tuple[str, ...]) -> Row:
    times, engine = case.times, case.decoding
    sync = times.step.sync if times else None
    overlapped = times.step.overlapped if times else None
    # Sharing GPUs cannot overlap, whatever the schedule says.
    taken = sync if case.input.schedule.kind == "sync" or case.colocated else overlapped
    return Row(
        values,
        codes,
        gpu_bytes=case.worst_train_bytes or None,
        kv_tokens=engine.kv_tokens if engine and engine.pool else None,
        sync_s=sync,
        async_s=overlapped,
        step_s=inf if taken is None else taken,
    )


def sweep_lines(rows: Sequence[Row]) -> Iterator[Line]:
    """The rows as a table."""
    fields = list(rows[0].values)
    head = [*fields, "train GPU", "KV tokens", "t_sync", "t_async", "speed-up", "errors"]
    cells = [
        [
            *(written(row.values[field]) for field in fields),
            "-" if row.gpu_bytes is None else amount(row.gpu_bytes, "bytes"),
            "-" if row.kv_tokens is None else f"{row.kv_tokens:,}",
            "-" if row.sync_s is None else amount(row.sync_s, "s"),
            "-" if row.async_s is None else amount(row.async_s, "s"),
            "-" if row.speedup is None else f"{row.speedup:.2f}",
            " ".join(row.errors[:3]) + (f" and {len(row.errors) - 3} more" if len(row.errors) > 3 else ""),
        ]
        for row in rows
    ]
    yield from table([head, *cells])


def plain_row(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    return {
        "values": dict(row.values),
        "errors": list(row.errors),
        "gpu_bytes": row.gpu_bytes,
        "kv_tokens": row.kv_tokens,
        "sync_s": row.sync_s,
        "async_s": row.async_s,
        "speedup": row.speedup,
    }
