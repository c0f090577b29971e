"""Prints as JSON which options the installed SGLang and routers have: `python fields.py {engine|smg}`.

Runs in the engines' environment. Of whatever has a command line its own parser is asked, since that is what will read our options; of
sglang-router the fields of its arguments, which it is started from. Per name: `flag`, `off` (what switches it off, or null), `form`
(flag, value, words: several after the flag) and `default` (null where there is none, or where JSON has no word for it).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from typing import Any


def of_parser(record: Any) -> dict[str, dict[str, Any]]:
    """The options that a class's `add_cli_args` declares, by the name of the field that they set."""
    parser = argparse.ArgumentParser(add_help=False)
    record.add_cli_args(parser)
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        longest = [name for name in action.option_strings if name.startswith("--")]
        if not longest or action.dest in found:
            continue
        off = next((name for name in longest if name.startswith("--no-")), None)
        form = "flag" if action.nargs == 0 else "words" if action.nargs in ("*", "+") else "value"
        others = [name[2:].replace("-", "_") for name in longest if not name.startswith("--no-")]
        found[action.dest] = {
            "flag": longest[0],
            "off": off,
            "form": form,
            "default": plain(action.default),
            "aliases": [name for name in others if name != action.dest],
        }
    return found


def of_fields(record: Any) -> dict[str, dict[str, Any]]:
    """The fields of a dataclass that is filled without a command line."""
    found: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(record):
        default = None if field.default is dataclasses.MISSING else field.default
        found[field.name] = {"flag": "", "off": None, "form": "value", "default": plain(default), "aliases": []}
    return found


def plain(value: Any) -> Any:
    """The value, where JSON can say it."""
    return value if isinstance(value, bool | int | float | str | list | None) else None


def main() -> None:
    """Prints one JSON object: sglang and sglang-router, or smg."""
    if sys.argv[1] == "smg":
        said = {"smg": of_parser(importlib.import_module("smg.router_args").RouterArgs)}
    else:
        said = {
            "sglang": of_parser(importlib.import_module("sglang.srt.server_args").ServerArgs),
            "sglang-router": of_fields(importlib.import_module("sglang_router.router_args").RouterArgs),
        }
    # Importing SGLang may print; what is ours is the last line.
    print("\n" + json.dumps(said))


if __name__ == "__main__":
    main()
