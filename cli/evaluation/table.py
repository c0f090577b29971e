"""The figures of an evaluation on a console, or as JSON. A summary goes in, text on stdout comes out; nothing is waited for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from palestra.agents.evaluation.records import plain
from palestra.agents.evaluation.stats import Estimate
from palestra.agents.evaluation.summary import Summary, fault_text
from palestra.agents.evaluation.types import Header, Row
from palestra.agents.transcript import text_of

SNIPPET = 160


def console() -> Console:
    """Stdout; a pipe has no width, so nothing is cut there."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def print_json(folder: Path, header: Header, summary: Summary) -> None:
    """One object on one line."""
    spec = header.spec
    head = {
        "folder": str(folder),
        "env": spec.env,
        "model": spec.model,
        "n": len(header.tasks),
        "k": spec.k,
        "task_set": header.task_set,
    }
    print(json.dumps({**head, **msgspec.to_builtins(summary)}, ensure_ascii=False))


def print_table(folder: Path, header: Header, summary: Summary) -> None:
    """The whole table."""
    out, spec = console(), header.spec
    out.print(
        f"\n{spec.env}  model {spec.model}  {len(header.tasks)} tasks x {spec.k}  {folder}",
        highlight=False,
        markup=False,
    )
    for text in headlines(header, summary):
        out.print(f"  {text}", highlight=False, markup=False)
    grid = Table(box=None)
    for name in ("", "value", "95%", "se", "n"):
        grid.add_column(name, justify="left" if not name else "right")
    grid.add_row("reward", *estimate_cells(summary.reward))
    for point in summary.passes:
        se = number(point.at_least_one_se)
        grid.add_row(f"pass@{point.k}", number(point.at_least_one), "", se, f"{point.tasks} tasks")
    for point in summary.passes[1:]:
        grid.add_row(f"pass^{point.k}", number(point.all_right), "", "", f"{point.tasks} tasks")
    for name, value in summary.components.items():
        grid.add_row(f"  {_safe(name)}", *estimate_cells(value))
    out.print(grid)
    _print_stops(out, summary)
    for text in cost_lines(header, summary):
        out.print(f"  {text}", highlight=False, markup=False)


def headlines(header: Header, summary: Summary) -> list[str]:
    """How much is there, how much of it is right, and what is missing."""
    lines = [right_line(header, summary)]
    if summary.errors:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in summary.error_kinds.items())
        lines.append(f"{summary.errors} errors, without a reward ({kinds}); --resume --retry-errors plays them again")
    if summary.owed:
        lines.append(f"{summary.owed} of {summary.planned} episodes were not played yet: --resume plays them")
    if summary.foreign:
        lines.append(f"{summary.foreign} rows are of episodes that are not planned any more; they count nowhere")
    if header.rescored_from:
        lines.append(f"rescored from {header.rescored_from}")
    lines += [f"changed {one['at']}: {'; '.join(one['differences'])}" for one in header.changes]
    return lines


def right_line(header: Header, summary: Summary) -> str:
    """As `scored 90/100, 80 right: 88.9% (80.0%-90.0% with the 10 errors as wrong or right)`."""
    told = f"scored {summary.scored}/{summary.finished}, {summary.right} right"
    if summary.scored:
        told += f": {100 * summary.right / summary.scored:.1f}%"
    if summary.errors and summary.right_bounds is not None:
        low, high = 100 * summary.right_bounds.low, 100 * summary.right_bounds.high
        told += f" ({low:.1f}-{high:.1f}% with the {summary.errors} errors as wrong or right)"
    return told + (f"; right: reward from {header.spec.pass_reward:g}" if header.spec.pass_reward != 1.0 else "")


def cost_lines(header: Header, summary: Summary) -> list[str]:
    """Turns, tokens, money and time."""
    cost = summary.cost
    lines = [
        f"{number(cost.turns_mean, 1)} turns an episode, {cost.tool_calls} tool calls ({cost.tool_errors} answered with an error)",
        f"{cost.prompt_tokens} prompt tokens ({cost.cached_tokens} cached), {cost.completion_tokens} sampled, {cost.calls} calls"
        + (f", {cost.calls_without_usage} of them told no tokens" if cost.calls_without_usage else "")
        + (f", {cost.retries} repeated" if cost.retries else ""),
    ]
    if cost.price is not None:
        lines.append(f"price {cost.price:.4f}")
    lines.append(
        f"episode {number(cost.seconds_p50, 2)} s, p95 {number(cost.seconds_p95, 2)} s; "
        f"call {number(cost.call_p50, 2)} s, p95 {number(cost.call_p95, 2)} s"
    )
    return lines


def estimate_cells(value: Estimate) -> tuple[str, str, str, str]:
    """Mean, interval, error and count; a dash for what cannot be told."""
    interval = "-" if value.interval is None else f"{value.interval.low:.3f} to {value.interval.high:.3f}"
    return number(value.mean), interval, number(value.se), str(value.n)


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def _print_stops(out: Console, summary: Summary) -> None:
    grid = Table(box=None)
    for name in ("stopped by", "episodes", "share", "reward"):
        grid.add_column(name, justify="left" if name == "stopped by" else "right")
    for stop in summary.stops:
        grid.add_row(stop.reason, str(stop.episodes), f"{100 * stop.share:.0f}%", number(stop.mean_reward))
    out.print(grid)


def print_rows(rows: list[Row]) -> None:
    """Episodes, a few lines each."""
    out = console()
    for row in rows:
        parts = " ".join(f"{name}={value:g}" for name, value in row.reward.components.items())
        head = f"\n{row.task_id} #{row.k}  {row.task}  reward {number(row.reward.value)}  {row.stop_reason}  {row.turns} turns  {parts}"
        out.print(_safe(head), highlight=False, markup=False)
        last = row.messages[-1] if row.messages else {}
        texts = [
            ("error", fault_text(row)),
            ("asked", _last_text(row, "user")),
            (f"last ({last.get('role', 'nothing was said')})", text_of(last)),
            ("answer", "" if row.answer is None else json.dumps(plain(row.answer), ensure_ascii=False)),
        ]
        for name, text in texts:
            if text:
                out.print(f"  {name}: {snippet(text)}", highlight=False, markup=False)


def _last_text(row: Row, role: str) -> str:
    return next((text_of(message) for message in reversed(row.messages) if message.get("role") == role), "")


def snippet(text: str) -> str:
    """One short line of a text."""
    flat = " ".join(_safe(text).split())
    return flat if len(flat) <= SNIPPET else f"{flat[: SNIPPET - 1]}…"


def _safe(text: str) -> str:
    """Without characters that steer a terminal: a model wrote this."""
    return "".join(char if char.isprintable() or char in " \n" else "\ufffd" for char in text)
