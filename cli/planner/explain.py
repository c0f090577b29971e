"""What is behind a code, a field or a number: `palestra plan --explain`, and the page of all rules.

In: a name, and a report where numbers of one plan are asked for. Out: lines. Reads this package's own source for what its fields say of
themselves, no other I/O.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from palestra.cli.planner.examples import data_of
from palestra.cli.planner.inputs import RUNS, PlanInput, section_of
from palestra.cli.planner.plan import plan
from palestra.cli.planner.rules import registry
from palestra.cli.planner.text import Line, amount, settings, wrapped, written
from palestra.cli.planner.types import Example, Finding, Grade, PlanReport, Quantity, Rule
from palestra.envs.config import Section

GRADES = {
    Grade.EXACT: "exact: integer arithmetic on shapes",
    Grade.ESTIMATE: "estimate: a formula whose terms are known",
    Grade.GUESS: "guess: it rests on an efficiency that nobody measured",
}


def explain(name: str, report: PlanReport | None = None) -> list[Line]:
    """All that is known of a code, a field or a quantity.

    Raises:
        ValueError: nothing has this name; the message says which are near.
    """
    if name in registry():
        return list(_of_rule(registry()[name]))
    known = {} if report is None else {each.id: each for each in report.quantities}
    # A field and a number may have one name: boxes that are there, and boxes that are needed.
    found = [
        *(_of_field(name, report) if name in fields() else ()),
        *(_of_quantity(known[name]) if name in known else ()),
    ]
    if found:
        return found
    near = difflib.get_close_matches(name, [*registry(), *fields(), *known], n=3, cutoff=0.5)
    told = f"; near: {', '.join(near)}" if near else ""
    more = "" if report is not None else "; numbers of a plan need CONFIG or --recipe"
    raise ValueError(f"no rule, field or quantity {name}{told}{more}")


def _of_rule(rule: Rule) -> Iterator[Line]:
    yield Line(f"{rule.code}  {rule.severity}  {rule.path}: {rule.title}", "head")
    yield from wrapped(rule.why, "  ")
    if rule.after:
        yield Line(f"  asked only where these found nothing: {', '.join(rule.after)}", "dim")
    yield Line("")
    yield Line(f"  refused: {changes_of(rule.fails)}" if rule.fails.changes else f"  found in: {rule.fails.recipe}")
    for each in said(rule):
        yield from wrapped(f"{each.path}: {each.message}", "    ")
        if each.fix:
            yield from wrapped(f"fix: {each.fix}", "    ")
        if each.suggest:
            yield Line(f"    try: {settings(each.suggest)}", "dim")
    yield Line(f"  passes: {changes_of(rule.passes)}")


def said(rule: Rule) -> list[Finding]:
    """What a rule says of its own failing example."""
    return [each for each in plan(data_of(rule.fails)).findings if each.code == rule.code]


def changes_of(example: Example) -> str:
    """An example as words of a command line."""
    return f"--recipe {example.recipe} {settings(example.changes)}".rstrip()


def _of_field(path: str, report: PlanReport | None) -> Iterator[Line]:
    section, name = fields()[path]
    field = section.model_fields[name]
    kind = str(field.annotation) if not isinstance(field.annotation, type) else field.annotation.__name__
    yield Line(f"{path}: {kind.replace('typing.', '')}", "head")
    if doc := docs_of(section).get(name):
        yield from wrapped(doc, "  ")
    default = (
        "must be given" if field.is_required() else f"default {_shown(field.get_default(call_default_factory=True))}"
    )
    table = path.rpartition(".")[0]
    only = "" if path in _of_runs() else "; only the planner reads it"
    yield Line(f"  {default}{only}")
    if report is not None:
        yield from _value_in(path, report)
    about = [rule for rule in registry().values() if rule.path in (path, table)]
    if about:
        yield Line("")
    for rule in about:
        yield Line(f"  {rule.code}  {rule.severity}: {rule.title}", str(rule.severity))


def _value_in(path: str, report: PlanReport) -> Iterator[Line]:
    at: Any = report.resolved
    for key in path.split("."):
        at = at.get(key) if isinstance(at, dict) else None
    origin = " (derived)" if path in report.derived else ""
    yield Line(f"  in this plan: {_shown(at)}{origin}")
    for each in report.findings:
        if each.path == path:
            yield from wrapped(f"{each.code}: {each.message}", "    ")


def _shown(value: Any) -> str:
    return "none: derived or unknown" if value is None else written(value) if value != "" else '""'


def _of_quantity(quantity: Quantity) -> Iterator[Line]:
    yield Line(f"{quantity.id} = {amount(quantity.value, quantity.unit)}", "head")
    yield from wrapped(quantity.formula, "  ")
    for term, value in quantity.terms.items():
        yield Line(f"    {term} = {value:,.6g}" if value != int(value) else f"    {term} = {value:,.0f}")
    yield Line(f"  {GRADES[quantity.grade]}", "note" if quantity.grade is Grade.GUESS else "")
    if quantity.override:
        yield Line(f"  a measured value goes into {quantity.override}")


@cache
def fields() -> Mapping[str, tuple[type[Section], str]]:
    """Every field of a file: path -> its section and its name there. Tables that only a run has are among them."""
    found: dict[str, tuple[type[Section], str]] = {}
    for table in PlanInput.model_fields:
        if (section := section_of(table)) is not None:
            _walk(table, section, found)
    for path, where in _of_runs().items():
        found.setdefault(path, where)
    return found


@cache
def _of_runs() -> Mapping[str, tuple[type[Section], str]]:
    """Fields that a run reads."""
    found: dict[str, tuple[type[Section], str]] = {}
    for table, section in RUNS.items():
        _walk(table, section, found)
    return found


def _walk(table: str, section: type[Section], found: dict[str, tuple[type[Section], str]]) -> None:
    for name, field in section.model_fields.items():
        found.setdefault(f"{table}.{name}", (section, name))
        inner = next((each for each in _parts(field.annotation) if issubclass(each, Section)), None)
        if inner is not None:
            _walk(f"{table}.{name}", inner, found)


def _parts(annotation: Any) -> list[type]:
    return [each for each in (annotation, *getattr(annotation, "__args__", ())) if isinstance(each, type)]


@cache
def docs_of(section: type[Section]) -> dict[str, str]:
    """What the fields of a section say of themselves: the text below each in the source, its bases' fields included."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if each is not Section and issubclass(each, Section):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(body, ast.ClassDef)
            for above, below in zip(body.body, body.body[1:], strict=False):
                match above, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found
