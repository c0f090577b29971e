"""`palestra engine VERB ...`: inference engines that Palestra manages. Finds the verb's module and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.cli.verbs import run_verb

VERBS = {
    "install": ("palestra.cli.engines.install", "make the engines' own Python environment"),
    "serve": ("palestra.cli.engines.serve", "start engines and the router in front of them, until interrupted"),
    "agent": ("palestra.cli.engines.agent", "fetch published weights on an engine's host, for transports that need it"),
}
"""The module whose `main(argv)` does it, and what it does."""


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    return run_verb("palestra engine", "SGLang engines, managed.", VERBS, argv)
