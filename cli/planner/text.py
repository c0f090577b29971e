"""A report for people: lines of text, each with a style. Pure.

In: a report. Out: what `palestra plan` prints. Everything is taken from the report's quantities by the beginnings of their ids, so a number
that a plan does not have is left out, and one that this module does not know by name is still shown.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palestra.cli.planner.types import Finding, Grade, PlanReport, Quantity, Severity
from palestra.envs.overrides import read_value

WIDTH = 116
BAR = 40
"""Characters of a bar."""
BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
STAGE = re.compile(r"train\.stage\.(\d+)\.(\w+?)(?:_bytes)?$")
TOTAL = "gpu"
"""The part of a stage that is all of it."""
ENGINE_PARTS = (("weights", "#"), ("state", "="), ("kv", "+"), ("rest", "."))
"""Of an engine's GPU, and how each is drawn."""


class Line(NamedTuple):
    """One line."""

    text: str
    style: str = ""
    """error, warning, note, head, dim, or nothing."""


def report_lines(report: PlanReport, name: str) -> list[Line]:
    """The whole report; `name`: of what was planned."""
    return [
        Line(f"plan of {name}: {summary(report)}", "head"),
        Line(counted(report)),
        *finding_lines(report.findings),
        *_memory(report),
        *_engine(report),
        *_times(report),
        *_numbers(report),
        *_guesses(report),
        *_paragraphs("advice", report.advice),
        *_refusals(report),
    ]


def summary(report: PlanReport) -> str:
    """Model, machines and placement in a few words; what could not be read is left out."""
    model, hardware = report.resolved.get("model", {}), report.resolved.get("hardware", {})
    placement = report.resolved.get("placement", {})
    words = [str(model.get("preset") or model.get("path") or "a model by its dimensions")]
    if (gpu := hardware.get("gpu", "cpu")) == "cpu":
        words.append("no GPU")
    else:
        words.append(f"{hardware.get('nodes', 1)} x {hardware.get('gpus_per_node', 8)} {gpu}")
    if mode := placement.get("mode"):
        words.append(str(mode))
    return ", ".join(words)


def counted(report: PlanReport) -> str:
    """How many findings there are of each severity."""
    return ", ".join(_many(len(report.of(severity)), str(severity)) for severity in Severity)


def finding_lines(findings: Iterable[Finding]) -> Iterator[Line]:
    """Findings under their severities."""
    severity = None
    for each in findings:
        if each.severity is not severity:
            severity = each.severity
            yield from _head(f"{severity}s")
        yield Line(f"  {each.code}  {each.path}", str(severity))
        yield from wrapped(each.message, "    ")
        if each.fix:
            yield from wrapped(f"fix: {each.fix}", "    ")
        if each.suggest:
            yield Line(f"    try: {settings(each.suggest)}", "dim")


def findings_text(findings: Iterable[Finding]) -> list[str]:
    """Findings as lines without styles, for whoever prints them beside something else."""
    return [line.text for line in finding_lines(findings) if line.text]


def _memory(report: PlanReport) -> Iterator[Line]:
    """A row per pipeline stage, beside what one GPU has. `rest`: runtime, workspaces and what the allocator loses."""
    stages: dict[int, dict[str, float]] = {}
    for each in report.quantities:
        if found := STAGE.match(each.id):
            stages.setdefault(int(found[1]), {})[found[2]] = each.value
    if not stages:
        return
    limit = value_of(report, "hardware.gpu_bytes")
    parts = [part for part in dict.fromkeys(part for held in stages.values() for part in held) if part != TOTAL]
    told = f" of one GPU, limit {amount(limit, 'bytes')}" if limit else ""
    yield from _head(f"training memory by pipeline stage{told}")
    rows = [["stage", *parts, "rest", "in all", "of the limit" if limit else ""]]
    for stage, held in stages.items():
        whole = held.get(TOTAL, sum(held.values()))
        cells = [amount(held[part], "bytes") if part in held else "-" for part in parts]
        rest = amount(whole - sum(value for part, value in held.items() if part != TOTAL), "bytes")
        rows.append([str(stage), *cells, rest, amount(whole, "bytes"), bar(whole / limit) if limit else ""])
    yield from table(rows)


def _engine(report: PlanReport) -> Iterator[Line]:
    """What an engine's GPU is filled with."""
    parts = [(name, mark, value_of(report, f"engine.{name}_bytes")) for name, mark in ENGINE_PARTS]
    there = [(name, mark, value) for name, mark, value in parts if value is not None and value > 0]
    if len(there) < 2:
        return
    whole = sum(value for _, _, value in there)
    where = "of one GPU" if value_of(report, "hardware.gpu_bytes") else "without a GPU"
    yield from _head(f"engine memory {where}, {amount(whole, 'bytes')}")
    drawn = "".join(mark * max(1, round(BAR * value / whole)) for _, mark, value in there)
    legend = "  ".join(f"{mark} {name} {amount(value, 'bytes')}" for name, mark, value in there)
    yield Line(f"  [{drawn}]  {legend}")


def _times(report: PlanReport) -> Iterator[Line]:
    """Of a step, in each schedule."""
    yield from _listed("a step", [each for each in report.quantities if each.id.startswith("time.")])


def _numbers(report: PlanReport) -> Iterator[Line]:
    """All that has no place of its own."""
    rest = [each for each in report.quantities if not STAGE.match(each.id) and not each.id.startswith("time.")]
    yield from _listed("numbers", rest)


def _listed(title: str, found: Sequence[Quantity]) -> Iterator[Line]:
    if found:
        yield from _head(title)
        yield from table([[each.id, amount(each.value, each.unit), str(each.grade)] for each in found])


def _guesses(report: PlanReport) -> Iterator[Line]:
    """Which measurement would replace which guess."""
    waiting: dict[str, list[str]] = {}
    for each in report.quantities:
        if each.grade is Grade.GUESS and each.override:
            waiting.setdefault(each.override, []).append(each.id)
    if waiting:
        yield from _head("guesses, and the fields that take a measured value instead")
        for field, ids in waiting.items():
            yield from wrapped(f"{field}: {', '.join(ids)}", "  ")


def _refusals(report: PlanReport) -> Iterator[Line]:
    if report.not_built:
        yield from _head("palestra train")
        yield from wrapped(f"this build would refuse: {', '.join(report.not_built)}", "  ")


def _paragraphs(title: str, texts: Sequence[str]) -> Iterator[Line]:
    if texts:
        yield from _head(title)
        for text in texts:
            yield from wrapped(f"- {text}", "  ")


def value_of(report: PlanReport, name: str) -> float | None:
    """A quantity's value; None: the plan has none of this id."""
    return next((each.value for each in report.quantities if each.id == name), None)


def amount(value: float, unit: str) -> str:
    """A value in its unit, for people."""
    if value != value or value in (float("inf"), float("-inf")):
        return f"{value} {unit}".removesuffix(" 1")
    if unit == "bytes":
        size, name = next(((size, name) for size, name in BYTES if abs(value) >= size), (1, "B"))
        return f"{value / size:.2f} {name}" if size > 1 else f"{value:.0f} B"
    if unit == "s":
        return f"{value * 1000:.2f} ms" if 0 < abs(value) < 1 else f"{value:.1f} s"
    told = f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
    return told if unit == "1" else f"{told} {unit}"


def bar(share: float) -> str:
    """A share of a whole, drawn."""
    filled = min(BAR, max(0, round(BAR * share)))
    return f"{share:>4.0%} [{'#' * filled}{'.' * (BAR - filled)}]{'!' if share > 1 else ''}"


def written(value: Any) -> str:
    """A value as TOML writes it; a text without quotes where it can be read back so."""
    if isinstance(value, str):
        return value if value and read_value(value) == value else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inside, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inside(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _inside(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else written(value)


def settings(changes: Mapping[str, Any]) -> str:
    """Changes as words of a command line, quoted for a shell where they must be; a field that is taken away cannot be said there."""
    words = [shlex.quote(f"--{path}={written(value)}") for path, value in changes.items() if value is not None]
    taken = [path for path, value in changes.items() if value is None]
    return " ".join([*words, *([f"without {', '.join(taken)}"] if taken else [])])


def table(rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Columns: the first to the left, figures to the right, what is drawn or said at the end to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < index < len(row) - 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line(f"  {'  '.join(cells)}".rstrip())


def _head(title: str) -> Iterator[Line]:
    yield Line("")
    yield Line(title, "head")


def wrapped(text: str, indent: str) -> Iterator[Line]:
    """A text in lines of at most `WIDTH` characters, the later ones further to the right."""
    for part in textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield Line(part)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
