"""`palestra env check ID...`: tries the laws that every environment keeps.

In: ids. Out: a table per environment, or a JSON object per line; with `--fill` the scores in a document. Exit status: 0 every law that
could be tried holds; 1 one does not; 2 an environment cannot be made. Waits for the environments and for the processes that laws start.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.cli.envs.arguments import add_env, look_here, read_set
from palestra.cli.envs.messages import printable
from palestra.cli.envs.scores import fill
from palestra.envs.checking import LAWS, Report, Verdict, check
from palestra.envs.types import EnvError

COLOURS = {Verdict.PASSED: "green", Verdict.FAILED: "red", Verdict.UNTESTED: "yellow"}


def main(argv: Sequence[str]) -> int:
    """Checks what is named."""
    parser = argparse.ArgumentParser(
        prog="palestra env check", description="Try the laws that every environment keeps.", allow_abbrev=False
    )
    add_env(parser, many=True)
    parser.add_argument("--tasks", type=int, default=5, metavar="N", help="tasks that are tried (5)")
    parser.add_argument("--law", action="append", choices=sorted(LAWS), help="only this law; may be repeated")
    parser.add_argument("--json", action="store_true", help="a JSON object per line instead of tables")
    parser.add_argument(
        "--fill",
        type=Path,
        metavar="FILE",
        help="write the scores into this document, between <!-- scores --> and <!-- /scores -->",
    )
    options = parser.parse_args(argv)
    if options.tasks < 1:
        parser.error(f"--tasks must be at least 1, got {options.tasks}")
    logger = logging.getLogger("palestra")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # graders are made to fail here, and say so in the report
    try:
        args = read_set(options.set)
        reports = []
        for env_id in options.ids:
            look_here(env_id)
            reports.append(check(env_id, args, tasks=options.tasks, laws=options.law))
            _show(reports[-1], options.json)
        if options.fill is not None:
            fill(options.fill, reports)
    except (EnvError, ValueError) as error:
        print(f"palestra env check: {error}", file=sys.stderr)
        return 2
    finally:
        logger.setLevel(level)
    return 0 if all(report.passed for report in reports) else 1


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False, default=str), flush=True)
        return
    console = Console(highlight=False)
    console.print(f"[bold]{report.env_id}[/]  {len(report.tasks)} of {report.size} tasks, {report.seconds:.1f} s")
    table = Table("law", "verdict", "what it asks, and what was seen", box=None, pad_edge=False)
    for outcome in report.outcomes:
        seen = f"\n[dim]{escape(printable(outcome.detail))}[/]" if outcome.detail else ""
        verdict = f"[{COLOURS[outcome.verdict]}]{outcome.verdict}[/]"
        table.add_row(outcome.law, verdict, escape(outcome.says) + seen)
    console.print(table)
    if report.scores:
        console.print("mean reward  " + ", ".join(f"{name} {value:.3f}" for name, value in report.scores.items()))
    console.print(", ".join(f"{len(report.having(verdict))} {verdict}" for verdict in Verdict))
