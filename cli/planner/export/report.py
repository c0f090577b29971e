"""`run.toml`, `train.toml`, `plan.json` with its schema, and `PLAN.md`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from palestra.cli.planner.export import tables
from palestra.cli.planner.export.training import RUN, TRAIN, run_form
from palestra.cli.planner.export.types import Export, Files
from palestra.cli.planner.export.words import comment
from palestra.cli.planner.plain import dumped, plain
from palestra.cli.planner.types import Finding, Grade, PlanReport, Quantity

SCHEMA = "plan.schema.json"
PARTS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def run_toml(export: Export) -> Files:
    """The input with every default and derived field written out, which is planned to the same findings; and what of it a run takes."""
    about = ["What palestra train takes of run.toml."]
    if export.apart:
        about.append("engines.sh starts the engines, and the scripts name their addresses.")
    return {
        RUN: comment(export.head) + "\n" + tables.dump(export.report.resolved),
        TRAIN: comment([*export.head, *about]) + "\n" + tables.dump(run_form(export)),
    }


def plan_json(export: Export) -> Files:
    """The report for programs, and what they can rely on in it."""
    return {"plan.json": dumped(plain(export.report)), SCHEMA: schema_text()}


def schema_text() -> str:
    """The JSON schema of plan.json."""
    return files("palestra.cli.planner.export").joinpath(SCHEMA).read_text(encoding="utf-8")


def plan_md(export: Export, left_out: Mapping[str, str]) -> Files:
    """The report for people. `left_out`: file -> why this plan has none."""
    report = export.report
    lines = ["# Plan", "", *(f"{line}  " for line in export.head), ""]
    lines += ["## Findings", "", *_findings(report.findings), ""]
    lines += ["## Where to put what", "", *(_bullets(report.advice) or ["Nothing to say."]), ""]
    lines += ["## Figures", "", *_figures(report.quantities), ""]
    lines += ["## Before it runs", "", *_bullets(_owed(report)), ""]
    lines += [
        "## Files that this plan has not",
        "",
        *(_bullets(f"`{name}`: {why}" for name, why in left_out.items()) or ["None."]),
    ]
    return {"PLAN.md": "\n".join(lines) + "\n"}


def _findings(findings: Iterable[Finding]) -> Iterator[str]:
    rows = [(str(each.severity), each.code, f"`{each.path}`", each.message, _fix(each)) for each in findings]
    yield from _table(("", "code", "field", "what", "what to do"), rows) if rows else ("None.",)


def _fix(finding: Finding) -> str:
    told = ", ".join(
        f"{path} = {json.dumps(value, ensure_ascii=False)}"
        for path, value in finding.suggest.items()
        if path not in finding.fix
    )
    return "; ".join(part for part in (finding.fix, told) if part)


def _figures(quantities: Iterable[Quantity]) -> Iterator[str]:
    rows = [(f"`{each.id}`", shown(each), str(each.grade), _source(each)) for each in quantities]
    yield from _table(("figure", "value", "how sure", "from"), rows) if rows else ("None.",)


def _source(quantity: Quantity) -> str:
    better = (
        f"; measure it and give `{quantity.override}`" if quantity.grade is Grade.GUESS and quantity.override else ""
    )
    return f"{quantity.formula}{better}"


def shown(quantity: Quantity) -> str:
    """A figure with its unit, bytes in the unit that suits them."""
    value = quantity.value
    if quantity.unit == "bytes" and abs(value) >= 1024:
        name = [name for name, size in PARTS.items() if abs(value) >= size][-1]
        return f"{value / PARTS[name]:.2f} {name}"
    number = f"{round(value):,}" if float(value).is_integer() else f"{value:,.4g}"
    return number if quantity.unit in ("", "1") else f"{number} {quantity.unit}"


def _owed(report: PlanReport) -> list[str]:
    """What stands between these files and a run."""
    owed = []
    if "env" not in report.resolved:
        owed.append("`train.toml` has no `[env]`: say what is played (`env.id`).")
    if not report.resolved.get("model", {}).get("path"):
        owed.append("`model.path` is not given: the scripts take it from `MODEL`.")
    if report.not_built:
        fields = ", ".join(f"`{each}`" for each in report.not_built)
        owed.append(
            f"`palestra train` of this version refuses these fields by name, since nothing would honour them: {fields}."
        )
    return owed or ["Nothing is missing."]


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield _row(("---",) * len(head))
    for row in rows:
        yield _row(row)


def _row(cells: Iterable[Any]) -> str:
    # A cell is one line, and a bar in it would end it.
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"
