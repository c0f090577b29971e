"""`palestra eval ENV --model M --base-url URL`: plays an environment n times k times; `eval show|diff|rescore` read what came of it.

In: an environment, a model's URL, or the folders of evaluations. Out: a folder, tables or JSON, and an exit status: 0 done, 1 it could not
go on, 2 what was asked for is wrong, 3 done but for episodes without a reward, 130 stopped by the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

READERS = {
    "show": "palestra.cli.evaluation.show",
    "diff": "palestra.cli.evaluation.diff",
    "rescore": "palestra.cli.evaluation.rescore",
}


def main(argv: Sequence[str]) -> int:
    """Evaluates, or reads an evaluation; its exit status."""
    if argv and argv[0] in READERS:
        return int(importlib.import_module(READERS[argv[0]]).main(argv[1:]))
    from palestra.cli.evaluation.run import main as run

    return run(argv)
