"""What a model call costs in Palestra's gateway, and in its peers.

`--setup` installs the peers and starts everything, `--quick` measures within a minute, no option measures at length, `--teardown` ends what
runs. The last line printed is one JSON object. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

if TYPE_CHECKING:
    from benchmarks.gateway_stage import Stage


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/gateway.py", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="install the peers and start everything")
    what.add_argument("--quick", action="store_true", help="measure within a minute")
    what.add_argument("--teardown", action="store_true", help="end what --setup started")
    what.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role:
        from benchmarks.gateway_roles import play

        return play(*options.role)
    from benchmarks.gateway_stage import Stage

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    stage = Stage()
    if options.teardown:
        print(json.dumps({"ended": stage.desk.end_all()}))
        return 0
    return _setup(stage) if options.setup else _measure(stage, quick=options.quick)


def _setup(stage: Stage) -> int:
    try:
        stage.install()
        stage.start()
        stage.leave_running()
    finally:
        stage.stop()
    print(json.dumps({name: process.url for name, process in stage.up.items()}))
    return 0


def _measure(stage: Stage, *, quick: bool) -> int:
    from benchmarks.gateway_cells import FULL, QUICK, Cells

    try:
        stage.install()
        stage.start()
        report = Cells(stage, QUICK if quick else FULL).run()
    finally:
        stage.stop()
    print(json.dumps(report))
    return 0 if not report["errors"] and report["store"] == "every turn once" else 1


if __name__ == "__main__":
    sys.exit(main())
