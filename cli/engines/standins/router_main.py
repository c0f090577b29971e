"""Starts sglang-router from its own arguments as one JSON object: `python router_main.py '{"port": 30000, ...}'`.

The router's command line cannot say everything that its arguments can (the policy consistent_hashing, for one). Runs in the engines'
environment, until it is told to stop. Names of fields are those of `sglang_router.router_args.RouterArgs`.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    """Runs the router; returns when it has stopped."""
    given = json.loads(sys.argv[1])
    # Pairs are tuples there, which JSON does not have.
    for name in ("prefill_urls", "control_plane_api_keys"):
        given[name] = [tuple(pair) for pair in given.get(name, [])]
    # By name: this file also lies in palestra, where there is no router to import. Its own launcher is left aside: that one loads all of
    # SGLang and torch first, for a test's router.
    arguments = importlib.import_module("sglang_router.router_args").RouterArgs(**given)
    importlib.import_module("sglang_router.router").Router.from_args(arguments).start()


if __name__ == "__main__":
    main()
