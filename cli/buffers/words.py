"""What the verbs of `palestra buffer` share: how a run's buffer is found and read, and how sizes and times are written.

In: a run folder, of a live, finished or killed run. Out: a reader of its buffer. Waits for the disk, or for the run's database.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from palestra.server.buffer.opening import has_buffer, open_buffer_reader
from palestra.server.buffer.types import GroupEntry, RunBufferReader
from palestra.server.types import GroupState, StoreError, TrainingSample

STATES = tuple(str(state) for state in GroupState if state != GroupState.OPEN)
"""A group is in the buffer once it is complete."""
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def options_of(verb: str, about: str) -> argparse.ArgumentParser:
    """A parser with the run's folder, which every verb takes."""
    parser = argparse.ArgumentParser(prog=f"palestra buffer {verb}", description=about, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder")
    return parser


def add_state(parser: argparse.ArgumentParser) -> None:
    """`--state`, as often as wanted."""
    told = "only groups of this state; may be given more than once"
    parser.add_argument("--state", action="append", choices=STATES, help=told)


def store_of(run: Path) -> Path:
    """The store folder of a run that has a buffer.

    Raises:
        StoreError: there is no such run, or it never stored anything.
    """
    store = run / "store"
    if not has_buffer(store):
        raise StoreError(f"{run} holds no buffer; is this the folder of a run?")
    return store


@contextmanager
def reading(run: Path) -> Iterator[RunBufferReader]:
    """A reader of the run's buffer, closed afterwards.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    reader = open_buffer_reader(store_of(run))
    try:
        yield reader
    finally:
        reader.close()


def of_states(entries: Iterable[GroupEntry], states: list[str] | None) -> list[GroupEntry]:
    """Those that `--state` asks for; all where it was not given."""
    return [entry for entry in entries if states is None or entry.state in states]


def token_versions(row: TrainingSample) -> NDArray[np.int64]:
    """The policy version of each token; -1 where it was not sampled."""
    versions = np.full(len(row.token_ids), -1, np.int64)
    for span in row.spans:
        versions[span.start : span.end] = span.version
    return versions


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def duration(seconds: float) -> str:
    """A length of time for people."""
    for length, unit in UNITS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"
