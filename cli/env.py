"""`palestra env VERB ...`: make, list, look at, check, try and serve environments. Finds the verb's module and nothing else."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

VERBS = {
    "new": ("palestra.cli.envs.new", "write a package with an environment of your own"),
    "list": ("palestra.cli.envs.listing", "say which environments there are: built-ins and plugins"),
    "show": ("palestra.cli.envs.show", "show an environment: its prompt, tools, arguments and a task"),
    "check": ("palestra.cli.envs.check", "try the laws that every environment keeps"),
    "try": ("palestra.cli.envs.console", "play an episode in the terminal, in the model's place"),
    "serve": ("palestra.server.env_host.main", "serve an environment over HTTP to other trainers and languages"),
}
"""The module whose `main(argv)` does it, and what it does."""


def main(argv: Sequence[str]) -> int:
    """Runs a verb; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra env", description="Environments.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (_, about) in VERBS.items():
        verbs.add_parser(verb, help=about, add_help=False)
    known, _ = parser.parse_known_args(list(argv)[:1])
    module = importlib.import_module(VERBS[known.verb][0])
    return int(module.main(list(argv)[1:]))
