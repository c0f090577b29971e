"""The processes that `gateway.py` starts from itself: `--role mock|service|load ARGUMENT...`.

In: a role's arguments. Out: its URL in a file for those that serve, its result on stdout for the load generator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import orjson

from benchmarks.gateway_texts import Texts


def play(role: str, *arguments: str) -> int:
    """Runs one role; the exit status."""
    if role == "load":
        from benchmarks.gateway_http import raise_file_limit
        from benchmarks.gateway_load import Job, main

        raise_file_limit()
        print(main(Job(**orjson.loads(sys.stdin.buffer.read())), Texts.load(Path(arguments[0]))))
        return 0
    ready, *rest = arguments
    if role == "mock":
        from benchmarks import gateway_mock

        gateway_mock.run(Path(rest[0]), _writer(Path(ready)))
        return 0
    from benchmarks import gateway_service

    store, model, engine, token = rest
    return 0 if gateway_service.run(Path(store), Path(model), engine, token, _writer(Path(ready))) else 1


def _writer(path: Path) -> Callable[[str], None]:
    """Tells whoever started us where we are: the whole URL or nothing."""

    def write(url: str) -> None:
        aside = path.with_suffix(".new")
        aside.write_text(url)
        aside.replace(path)

    return write
