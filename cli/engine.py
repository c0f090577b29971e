"""`palestra engine VERB ...`: inference engines that Palestra manages. Finds the verb's module and nothing else."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

VERBS = {
    "install": "make the engines' own Python environment",
    "serve": "start engines and the router in front of them, until interrupted",
    "agent": "fetch published weights on an engine's host, for transports that need it",
}


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra engine", description="SGLang engines, managed.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, about in VERBS.items():
        verbs.add_parser(verb, help=about, add_help=False)
    known, _ = parser.parse_known_args(list(argv)[:1])
    module = importlib.import_module(f"palestra.cli.engines.{known.verb}")
    return int(module.main(list(argv)[1:]))
