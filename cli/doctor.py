"""`palestra doctor CHECK ...`: finds the check's module and nothing else.

In: the words of the command line. Out: the check's exit status: 0; 1 where something does not hold; 2 where nothing can be tried. Waits for
the check.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

CHECKS = {
    "template": "does a model's chat template keep what was seen?",
    "sandbox": "what do this machine's sandboxes hold, and does an attack get out?",
}


def main(argv: Sequence[str]) -> int:
    """Runs a check; its exit status."""
    parser = argparse.ArgumentParser(prog="palestra doctor")
    checks = parser.add_subparsers(dest="check", metavar="CHECK", required=True)
    for check, about in CHECKS.items():
        checks.add_parser(check, help=about, add_help=False)
    known, _ = parser.parse_known_args(argv[:1])
    module = importlib.import_module(f"palestra.cli.doctor_{known.check}")
    return int(module.main(argv[1:]))
