"""`palestra role NAME --config RUN/run.toml`: one process of a job. Every launcher starts roles by this verb."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from palestra.cli.roles.context import enter

ROLES = ("engine", "service", "worker", "trainer", "evaluator")


def main(argv: Sequence[str]) -> int:
    """Runs the role until it is told to end. A fault is logged, its last line printed for the supervisor to show."""
    parser = argparse.ArgumentParser(prog="palestra role")
    parser.add_argument("name", choices=ROLES)
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args(argv)
    context = enter(options.name, options.config)
    role = importlib.import_module(f"palestra.cli.roles.{options.name}")
    try:
        return int(role.main(context))
    except Exception as error:
        logging.getLogger(__name__).exception("role %s failed", options.name)
        traceback.print_exc(limit=-3)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
