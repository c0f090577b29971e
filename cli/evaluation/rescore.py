"""`palestra eval rescore DIR`: the environment's present rubric on the conversations of an evaluation, into another folder.

No model is asked. It waits for the graders. Exit status: 0; 1 it cannot be done; 3 episodes are without a reward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palestra.agents.evaluation.records import latest, read_rows
from palestra.agents.evaluation.rescore import rescore
from palestra.agents.evaluation.summary import summarise
from palestra.agents.evaluation.types import EvalError
from palestra.cli.evaluation.options import reader
from palestra.cli.evaluation.table import print_json, print_table
from palestra.envs.types import EnvError, TaskError


def main(argv: Sequence[str]) -> int:
    """Scores again."""
    made = reader("rescore", "Scores the conversations of an evaluation again, with the environment as it is.")
    made.add_argument("folder", type=Path)
    made.add_argument("--out", type=Path, metavar="DIR", help="the new folder; DIR-rescored unless given")
    made.add_argument("-c", "--concurrency", type=int, default=4, help="graders at a time")
    made.add_argument("--json", action="store_true", help="the figures as one JSON object")
    options = made.parse_args(list(argv))
    out = options.out or options.folder.with_name(f"{options.folder.resolve().name}-rescored")
    console = Console(stderr=True, soft_wrap=True)
    try:
        with console.status("scoring") as status:
            header = rescore(
                options.folder,
                out,
                concurrency=max(1, options.concurrency),
                on_row=lambda count: status.update(f"scored {count}"),
            )
    except (EvalError, EnvError, TaskError) as error:
        print(f"palestra eval rescore: {error}", file=sys.stderr)
        return 1
    summary = summarise(header, latest(read_rows(out)))
    (print_json if options.json else print_table)(out, header, summary)
    return 3 if summary.errors else 0
