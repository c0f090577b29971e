"""The report of an evaluation: one HTML file that opens offline, without a script.

A header and rows go in, a page comes out. Everything that a model, a task or a user wrote is escaped by the template; the page's own
policy allows no script and no request, should that ever fail. Waits for the disk only.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from palestra.agents.evaluation.records import plain
from palestra.agents.evaluation.report.charts import histogram, pass_curve
from palestra.agents.evaluation.stats import Estimate
from palestra.agents.evaluation.summary import Summary, fault_text, is_right, summarise, worst
from palestra.agents.evaluation.types import Header, Key, Row
from palestra.agents.transcript import text_of
from palestra.envs.types import Message

EPISODES = 100
"""Episodes that are shown, the worst first."""
CHARACTERS = 4000
"""Of one message."""


def write_report(path: Path, header: Header, rows: Mapping[Key, Row]) -> None:
    """Writes the report to `path`.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(render_report(header, rows), encoding="utf-8", errors="replace")
    aside.replace(path)


def render_report(header: Header, rows: Mapping[Key, Row]) -> str:
    """The page."""
    mine = {key: rows[key] for key in header.keys if key in rows}
    summary = summarise(header, rows)
    return _template().render(
        header=header,
        spec=header.spec,
        summary=summary,
        figures=_figures(summary),
        share=None if not summary.scored else 100 * summary.right / summary.scored,
        curve=pass_curve(summary.passes),
        bars=histogram([row.reward.value for row in mine.values() if row.reward.value is not None]),
        episodes=[_episode(header, row) for row in worst(mine, EPISODES)],
        hidden=max(0, len(mine) - EPISODES),
        settings=_settings(header),
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = _figure
    return environment.get_template("report.html.j2")


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _figures(summary: Summary) -> list[tuple[str, str, str, str, str]]:
    """Rows of the table: name, value, interval, error, count."""
    lines = [("reward", *_cells(summary.reward))]
    for point in summary.passes:
        told = (_figure(point.at_least_one), "-", _figure(point.at_least_one_se), f"{point.tasks} tasks")
        lines.append((f"pass@{point.k}", *told))
    for point in summary.passes[1:]:
        lines.append((f"pass^{point.k}", _figure(point.all_right), "-", "-", f"{point.tasks} tasks"))
    return [*lines, *((name, *_cells(value)) for name, value in summary.components.items())]


def _cells(value: Estimate) -> tuple[str, str, str, str]:
    interval = "-" if value.interval is None else f"{value.interval.low:.3f} to {value.interval.high:.3f}"
    return _figure(value.mean), interval, _figure(value.se), str(value.n)


def _episode(header: Header, row: Row) -> dict[str, Any]:
    """What the template shows of one episode."""
    return {
        "row": row,
        "state": "error" if not row.scored else "right" if is_right(header, row) else "wrong",
        "answer": "" if row.answer is None else _cut(json.dumps(plain(row.answer), ensure_ascii=False)),
        "messages": [_message(message) for message in row.messages],
        "problem": fault_text(row),
    }


def _message(message: Message) -> dict[str, Any]:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return {
        "role": str(message.get("role")),
        "text": _cut(text_of(message)),
        "thought": _cut(str(message.get("reasoning_content") or "")),
        "calls": [_cut(f"{call.get('name')}({call.get('arguments')})") for call in calls if isinstance(call, Mapping)],
    }


def _cut(text: str) -> str:
    over = len(text) - CHARACTERS
    return text if over <= 0 else f"{text[:CHARACTERS]} … {over} more characters"


def _settings(header: Header) -> list[tuple[str, str]]:
    spec, versions = header.spec, header.provenance
    fields = {name: getattr(spec, name) for name in type(spec).__dataclass_fields__}
    told = {**fields, "created": header.created, "task_set": header.task_set, **versions}
    return [
        (name, value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False))
        for name, value in told.items()
    ]
