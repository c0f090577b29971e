"""What the verbs of `palestra env` have in common: an environment's id and arguments on a command line.

Words go in, an id and a dict come out. Nothing is waited for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from palestra.envs.overrides import read_settings


def add_env(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """Adds the environment's id (`many`: one or more) and `--set`."""
    told = "an environment, as in a run's configuration: palestra/Calculator-v0, or package.module:mine/Thing-v0"
    if many:
        parser.add_argument("ids", metavar="ID", nargs="+", help=told)
    else:
        parser.add_argument("id", metavar="ID", help=told)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="args.KEY=VALUE",
        help="an argument of the environment; the value is TOML, or a bare word. May be repeated",
    )


def read_set(words: Sequence[str]) -> dict[str, Any]:
    """The arguments that `--set` gave.

    Raises:
        ValueError: a word that is no args.NAME=VALUE.
    """
    return read_settings(words)["args"]


def look_here(env_id: str) -> None:
    """Lets `package.module:id` name a module of the folder where the command is given, behind all others."""
    if ":" in env_id and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
