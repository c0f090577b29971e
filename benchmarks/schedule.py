"""Schedules beside each other: synchronous, one-step-off and asynchronous, with and without partial rollout, over-sampling and filtering.

The gate plays them in virtual time: simulated engines and a simulated trainer around the real plan, turn log and buffer. Then a real run
of a tiny model per schedule, engine and trainer on a core each, is reported. `--setup` makes the tiny model, `--quick` measures within four
minutes, no option takes more steps. The last line printed is one JSON object. See docs/schedules.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

QUICK_S, LONG_S = 210.0, 1800.0
"""After so long the real runs are cut, seconds; ending them takes some more."""
PARTIAL = ("sync, partial", "sync, partial, over-sampling 1.5")
"""The cells whose bubbles are compared with the synchronous schedule's."""

if TYPE_CHECKING:
    from benchmarks.schedule_cells import Figures


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/schedule.py", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="make the tiny model of the real runs")
    what.add_argument("--quick", action="store_true", help="measure within four minutes")
    what.add_argument("--simulate", action="store_true", help="only the runs in virtual time")
    options = parser.parse_args(argv)
    if options.setup:
        from benchmarks.schedule_real import prepare

        print(prepare())
        return 0
    from benchmarks.schedule_cells import as_json, cells, play_all, table

    began = time.monotonic()
    found = play_all(cells())
    print("\n".join(table(found)), file=sys.stderr, flush=True)
    result = {**gate(found), "cells": as_json(found)}
    if not options.simulate:
        from benchmarks.schedule_real import measure

        left = QUICK_S - (time.monotonic() - began) if options.quick else LONG_S
        result["real"] = measure(steps=4 if options.quick else 16, within_s=left)
    print(json.dumps(result))
    return 0 if all(each.balanced for each in found.values()) else 1


def gate(found: dict[str, Figures]) -> dict[str, Any]:
    """The figures that are held to something."""
    from benchmarks.schedule_cells import BALANCED_S, EQUAL, FAST_S, QUICK, of_bound, of_ceiling

    bounds: dict[str, dict[str, float]] = {}
    for prefix, train_token_s in (("", BALANCED_S), (QUICK, FAST_S)):
        for name in ("one step off", "async 2"):
            one = found[prefix + name]
            bounds[one.name] = {
                "of_bound": round(of_bound(found[prefix + "sync"], one), 4),
                "of_ceiling": round(of_ceiling(one, train_token_s), 4),
            }
    cut = {name: round(1 - found[name].bubble / found["sync"].bubble, 4) for name in PARTIAL}
    return {
        "async_of_bound": min(min(bounds[prefix + "async 2"].values()) for prefix in ("", QUICK)),
        "bubble_cut": min(cut.values()),
        "bounds": bounds,
        "bubbles_cut": cut,
        "trainer_idle": {name: round(one.trainer_idle, 4) for name, one in found.items() if name.startswith(EQUAL)},
    }


if __name__ == "__main__":
    sys.exit(main())
