"""`palestra eval diff A B`: what the second evaluation does better or worse than the first, task by task. Only files are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from palestra.agents.evaluation.compare import Comparison, compare
from palestra.agents.evaluation.records import latest, read_header, read_rows
from palestra.agents.evaluation.types import EvalError
from palestra.cli.evaluation.options import reader
from palestra.cli.evaluation.table import console, number


def main(argv: Sequence[str]) -> int:
    """Compares; 1 where the two cannot be compared."""
    made = reader("diff", "The difference of two evaluations on the same tasks: the second minus the first.")
    made.add_argument("first", type=Path)
    made.add_argument("second", type=Path)
    made.add_argument("--json", action="store_true", help="one JSON object")
    options = made.parse_args(list(argv))
    try:
        sides = [(read_header(folder), latest(read_rows(folder))) for folder in (options.first, options.second)]
        comparison = compare(sides[0], sides[1])
    except EvalError as error:
        print(f"palestra eval diff: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(msgspec.to_builtins(comparison), ensure_ascii=False))
    else:
        _show(comparison, options.first, options.second)
    return 0


def _show(comparison: Comparison, first: Path, second: Path) -> None:
    out = console()
    out.print(f"\nA {first}\nB {second}\n{comparison.tasks} tasks, paired", highlight=False, markup=False)
    if comparison.left_out:
        out.print(f"{comparison.left_out} tasks have no scored episode in one of the two", highlight=False)
    for name, one, two in comparison.settings:
        out.print(f"  {name}: {one} -> {two}", highlight=False, markup=False)
    grid = Table(box=None)
    for name in ("", "A", "B", "B - A", "95%", "se", "p"):
        grid.add_column(name, justify="left" if not name else "right")
    for line in comparison.lines:
        difference = line.difference
        interval = difference.interval
        told = "-" if interval is None else f"{interval.low:+.3f} to {interval.high:+.3f}"
        mean = "-" if difference.mean is None else f"{difference.mean:+.3f}"
        cells = (
            number(line.first.mean),
            number(line.second.mean),
            mean,
            told,
            number(difference.se),
            number(difference.p),
        )
        grid.add_row(line.name, *cells)
    out.print(grid)
    same = comparison.tasks - comparison.better - comparison.worse
    out.print(
        f"B is better on {comparison.better} tasks, worse on {comparison.worse}, equal on {same}", highlight=False
    )
