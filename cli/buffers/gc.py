"""`palestra buffer gc RUN`: deletes arrays that no restore can need, of a run that is not running.

In: the run folder: its checkpoints say what may still be needed, its `[buffer]` section how long the rest stays. Out: what was deleted, on
stdout. A live run's service does the same by itself after every step; then this refuses, and `--dry-run` only tells. Exit status 0; 1 where
it could not be done. Waits for the disk or the database.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.cli.buffers.words import options_of, reading, size, store_of
from palestra.cli.config import ConfigError, RunConfig, read_run
from palestra.server.buffer.opening import open_buffer
from palestra.server.buffer.retention import Retention, Shelf, shelves_of, unwanted
from palestra.server.types import ServerError
from palestra.trainer.checkpoints import Checkpoints


@dataclass(frozen=True, slots=True)
class Policy:
    """What decides."""

    retention: Retention
    oldest_step: int
    """Train step of the oldest checkpoint that is kept."""
    url: str | None
    """Database of the run's groups; None: its own folder."""
    name: str
    """The run's, in that database."""


def main(argv: Sequence[str]) -> int:
    """Deletes, or says what it would delete."""
    parser = options_of("gc", "Deletes arrays that no restore can need.")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go; works beside a live run, too")
    parser.add_argument("--keep-hours", type=float, metavar="H", help="instead of buffer.keep_hours")
    parser.add_argument("--keep-bytes", type=int, metavar="N", help="instead of buffer.keep_bytes")
    parser.add_argument(
        "--oldest-step",
        type=int,
        metavar="STEP",
        help="a train step that may still be gone back to, beside those of the run's checkpoints",
    )
    options = parser.parse_args(argv)
    for name in ("keep_hours", "keep_bytes", "oldest_step"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is a number from 0 on")
    try:
        store = store_of(options.run)
        policy = policy_of(options)
        shelves = seen(options.run, policy)
        if options.dry_run:
            gone = unwanted(shelves, policy.retention, time.time())
        else:
            buffer = open_buffer(store, policy.url, policy.name, retention=policy.retention)
            try:
                shelves, gone = seen(options.run, policy), buffer.collect(policy.oldest_step)
            finally:
                buffer.close()
    except (ServerError, ConfigError, OSError) as error:
        print(f"palestra buffer gc: {error}", file=sys.stderr)
        return 1
    print(report(shelves, gone, policy.oldest_step, "would go" if options.dry_run else "went"))
    return 0


def policy_of(options: argparse.Namespace) -> Policy:
    """The run's own policy, with what the command line says instead.

    Raises:
        ConfigError: the run cannot be read, or nobody says what its checkpoints are.
    """
    config = read_run(options.run)
    kept = config.buffer if isinstance(config, RunConfig) else None
    hours = options.keep_hours if options.keep_hours is not None else kept.keep_hours if kept else 0.0
    limit = options.keep_bytes if options.keep_bytes is not None else kept.keep_bytes if kept else None
    found = Checkpoints(options.run / "checkpoints").all()
    steps = [each.meta.train_step for each in found[:1]] + [step for step in (options.oldest_step,) if step is not None]
    if not steps:
        raise ConfigError(f"{options.run} has no whole checkpoint: say with --oldest-step what could still be needed")
    retention = Retention(keep_s=hours * 3600, keep_bytes=limit)
    return Policy(retention, min(steps), kept.url if kept else None, config.run.name)


def seen(run: Path, policy: Policy) -> list[Shelf]:
    """What lies in the buffer, as the policy sees it now."""
    with reading(run) as reader:
        return shelves_of(reader.entries(), policy.oldest_step, time.time())


def report(shelves: Sequence[Shelf], gone: Sequence[str], oldest_step: int, verb: str) -> str:
    """What went and what stays, and why, in one line. A part is a segment file, or one group's arrays in a database."""
    cleared = sum(shelf.bytes for shelf in shelves if shelf.name in set(gone))
    needed = sum(shelf.bytes for shelf in shelves if shelf.free_at is None)
    total = sum(shelf.bytes for shelf in shelves)
    return (
        f"{len(gone)} of {len(shelves)} parts {verb}, {size(cleared)}; {size(total - cleared)} stay, {size(needed)} of it since runs or "
        f"restores to step {oldest_step} may need it"
    )
