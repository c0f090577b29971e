"""`palestra buffer VERB RUN ...`: what lies in a run's buffer. Finds the verb's module and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.cli.verbs import run_verb

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
    return run_verb("palestra buffer", "The data buffer of a run.", VERBS, argv)
