"""How fast groups go into the buffer and out of it, beside atroposlib's API server.

`--setup` installs the peer and starts nothing, `--quick` measures within a minute, no option measures at length. Groups of 8 rows of 2,048
and of 16,384 tokens: in process, in PostgreSQL where its programs are there, through the service's HTTP, and through the peer's, taking
turns; durable each time but for the peer, which keeps them in memory. The last line printed is one JSON object. See docs/buffer.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: our folders are named like installed packages

MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""As the supervisor starts its roles: glibc keeps the pages of rows that come and go. It reads them when a process starts."""


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/buffer.py", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="install the peer")
    what.add_argument("--quick", action="store_true", help="measure within a minute")
    what.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role:
        from benchmarks.buffer_roles import play

        return play(*options.role)
    from benchmarks.buffer_stage import Stage

    if options.setup:
        Stage.install()
        print(json.dumps({"installed": True}))
        return 0
    return _measure(quick=options.quick)


def _measure(*, quick: bool) -> int:
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **MALLOC})
    from benchmarks.buffer_cells import FULL, QUICK, Cells
    from benchmarks.buffer_stage import Stage

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    Stage.install()
    with Stage() as stage:
        report = Cells(stage, QUICK if quick else FULL).run()
    print(json.dumps(report))
    return 0 if not report["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
