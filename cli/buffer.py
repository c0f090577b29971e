"""`palestra buffer VERB RUN ...`: what lies in a run's buffer. Finds the verb's module and nothing else."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

VERBS = {
    "ls": (
        "palestra.cli.buffers.listing",
        "list the groups of a run: state, reason, step, age, versions, tokens, size",
    ),
    "show": ("palestra.cli.buffers.show", "show a group's rows: masks, sources, versions, rewards, text"),
    "export": ("palestra.cli.buffers.export", "write the rows to a Parquet file, one line a training row"),
    "gc": ("palestra.cli.buffers.gc", "delete arrays that no restore can need, as the retention says"),
}
"""The module whose `main(argv)` does it, and what it does."""


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra buffer", description="The data buffer of a run.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (_, about) in VERBS.items():
        verbs.add_parser(verb, help=about, add_help=False)
    known, _ = parser.parse_known_args(list(argv)[:1])
    module = importlib.import_module(VERBS[known.verb][0])
    return int(module.main(list(argv)[1:]))
