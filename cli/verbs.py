"""Verbs of a verb: `palestra env check`, `palestra engine serve`. Finds the module that is asked for and imports nothing else, so that
`--help` answers at once.

In: names with their modules, and the words of the command line. Out: the exit status of the module's `main(argv)`. Waits for it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence


def run_verb(
    prog: str, about: str | None, verbs: Mapping[str, tuple[str, str]], argv: Sequence[str], *, called: str = "verb"
) -> int:
    """Runs what the first word names. `verbs`: name -> (module, what it does); `called`: what such a name is called in the usage."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    known = parser.add_subparsers(dest=called, metavar=called.upper(), required=True)
    for name, (_, does) in verbs.items():
        known.add_parser(name, help=does, add_help=False)
    asked, _ = parser.parse_known_args(list(argv)[:1])
    module = importlib.import_module(verbs[getattr(asked, called)][0])
    return int(module.main(list(argv)[1:]))
