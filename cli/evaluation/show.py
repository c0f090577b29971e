"""`palestra eval show DIR`: the figures of an evaluation that goes on, ended or was killed. Only its files are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from palestra.agents.evaluation.parquet import write_parquet
from palestra.agents.evaluation.records import latest, read_header, read_rows
from palestra.agents.evaluation.report import write_report
from palestra.agents.evaluation.summary import summarise, worst
from palestra.agents.evaluation.types import EvalError
from palestra.cli.evaluation.options import reader
from palestra.cli.evaluation.table import print_json, print_rows, print_table


def main(argv: Sequence[str]) -> int:
    """Shows; 1 where there is nothing to show."""
    made = reader("show", "The figures of an evaluation.")
    made.add_argument("folder", type=Path)
    made.add_argument("--worst", type=int, default=0, metavar="N", help="and its N worst episodes")
    made.add_argument("--pass-reward", type=float, help="an episode counts as right from here on")
    made.add_argument("--json", action="store_true", help="the figures as one JSON object")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a report")
    made.add_argument("--parquet", action="store_true", help="write episodes.parquet into the folder")
    options = made.parse_args(list(argv))
    try:
        header, rows = read_header(options.folder), latest(read_rows(options.folder))
        if options.pass_reward is not None:
            header = replace(header, spec=replace(header.spec, pass_reward=options.pass_reward))
        (print_json if options.json else print_table)(options.folder, header, summarise(header, rows))
        if not options.json:
            print_rows(worst(rows, options.worst))
        if options.html is not None:
            write_report(options.html, header, rows)
        if options.parquet:
            write_parquet(options.folder, [rows[key] for key in header.keys if key in rows])
    except (EvalError, OSError) as error:
        print(f"palestra eval show: {error}", file=sys.stderr)
        return 1
    return 0
