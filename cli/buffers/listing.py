"""`palestra buffer ls RUN`: the groups of a run, in the order in which they came.

In: a run folder, live or not. Out: a table and a line of sums, or JSON lines. Exit status 0; 1 where there is no buffer. Waits for the disk
or the database.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from palestra.cli.buffers.words import add_state, duration, of_states, options_of, reading, size
from palestra.cli.evaluation.table import console
from palestra.server.buffer.types import GroupEntry
from palestra.server.types import ServerError


def main(argv: Sequence[str]) -> int:
    """Lists."""
    parser = options_of("ls", "The groups of a run, oldest first.")
    add_state(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="only the newest N")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args(argv)
    if options.limit is not None and options.limit < 1:
        parser.error("--limit is at least 1")
    try:
        with reading(options.run) as reader:
            everything, counts = reader.entries(), reader.counts()
    except (ServerError, OSError) as error:
        print(f"palestra buffer ls: {error}", file=sys.stderr)
        return 1
    found = of_states(everything, options.state)
    shown = found if options.limit is None else found[-options.limit :]
    now = time.time()
    if options.json:
        for entry in shown:
            print(json.dumps(described(entry, now), ensure_ascii=False))
        return 0
    print_table(shown, now)
    total = sum(entry.stored_bytes for entry in everything)
    states = ", ".join(f"{n} {state}" for state, n in counts.items())
    more = f"; {len(shown)} of {len(found)} are shown" if len(shown) < len(found) else ""
    console().print(
        f"{len(everything)} groups: {states}; arrays take {size(total)}{more}", highlight=False, markup=False
    )
    return 0


def described(entry: GroupEntry, now: float) -> dict[str, Any]:
    """One group, for JSON. Times are in seconds."""
    masked: dict[str, int] = {}
    for counts in entry.rollouts:
        for reason, n in counts.masked.items():
            masked[reason] = masked.get(reason, 0) + n
    return {
        "group": entry.group_id,
        "task": entry.task_id,
        "state": str(entry.state),
        "reason": entry.reason,
        "step": entry.step,
        "checkpoint": entry.checkpoint_id,
        "owner": entry.owner,
        "age_s": round(max(now - entry.put_at, 0.0), 3),
        "put_at": entry.put_at,
        "ended_at": entry.ended_at,
        "versions": list(entry.versions),
        "group_size": entry.group_size,
        "rollouts": len(entry.rollouts),
        "rewards": [counts.reward for counts in entry.rollouts],
        "trained_tokens": sum(counts.trained for counts in entry.rollouts),
        "masked_tokens": masked,
        "stored_bytes": entry.stored_bytes if entry.shelf is not None else None,
        "shelf": entry.shelf,
    }


def print_table(entries: Sequence[GroupEntry], now: float) -> None:
    """A line per group; `tokens` are those with mask 1, and those that were sampled and masked."""
    table = Table(box=None)
    for name in ("group", "task", "state", "step", "age", "versions", "rollouts", "rewards", "tokens", "size"):
        table.add_column(name, no_wrap=name in ("group", "state"), min_width=12 if name == "group" else None)
    for entry in entries:
        told = described(entry, now)
        rewards = " ".join("-" if reward is None else f"{reward:.2f}" for reward in told["rewards"])
        hidden = sum(told["masked_tokens"].values())
        table.add_row(
            entry.group_id,
            entry.task_id,
            told["state"] + (f" ({entry.reason})" if entry.reason else ""),
            "" if entry.step is None else str(entry.step),
            duration(told["age_s"]),
            _versions(entry.versions),
            f"{len(entry.rollouts)}/{entry.group_size}",
            rewards,
            f"{told['trained_tokens']}" + (f" +{hidden} masked" if hidden else ""),
            "-" if entry.shelf is None else size(entry.stored_bytes),
        )
    console().print(table)


def _versions(versions: Sequence[int]) -> str:
    """As 3, or 3-5, or 3,5."""
    if len(versions) > 1 and versions[-1] - versions[0] == len(versions) - 1:
        return f"{versions[0]}-{versions[-1]}"
    return ",".join(map(str, versions))
