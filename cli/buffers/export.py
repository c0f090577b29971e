"""`palestra buffer export RUN OUT.parquet`: the rows of a run's groups as a table for other programs, one line a training row.

In: a run folder, live or not. Out: a Parquet file, written aside and renamed, a row group at a time, so that memory holds one row group
whatever the run's size. Groups whose arrays are not stored any more are counted. Exit status 0; 1 where nothing could be written or a group
could not be read. Waits for the disk or the database.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from palestra.agents.evaluation.parquet import load_pyarrow
from palestra.agents.evaluation.types import EvalError
from palestra.cli.buffers.words import add_state, of_states, options_of, reading, token_versions
from palestra.server.buffer.types import GroupEntry, RunBufferReader
from palestra.server.types import ServerError, StoreError, TokenSource, TrainingSample

TOKENS = 1 << 20
"""Tokens of a row group, about."""


def main(argv: Sequence[str]) -> int:
    """Exports."""
    parser = options_of("export", "Training rows as a Parquet file.")
    parser.add_argument("out", type=Path, help="the file to write, OUT.parquet")
    add_state(parser)
    options = parser.parse_args(argv)
    try:
        arrow = load_pyarrow()
        with reading(options.run) as reader:
            entries = of_states(reader.entries(), options.state)
            table = Writer(arrow, options.out)
            failed = table.write_all(reader, entries)
    except (EvalError, ServerError, OSError) as error:
        print(f"palestra buffer export: {error}", file=sys.stderr)
        return 1
    for message in failed:
        print(f"palestra buffer export: left out: {message}", file=sys.stderr)
    gone = sum(entry.shelf is None for entry in entries)
    print(
        f"{options.out}: {table.rows} rows of {len(entries) - gone - len(failed)} groups"
        + (f"; {gone} more have no arrays stored" if gone else "")
    )
    return 1 if failed else 0


def schema_of(arrow: ModuleType) -> Any:
    """The columns. Lists of a row have one entry a token; names of the sources stand in the file's metadata."""
    tokens = {"token_ids": "int32", "loss_mask": "uint8", "sources": "uint8", "logprobs": "float32"}
    names = {source.name.lower(): int(source) for source in TokenSource}
    return arrow.schema(
        [
            *((name, arrow.string()) for name in ("group_id", "task_id", "state", "reason")),
            ("step", arrow.int64()),
            ("rollout_id", arrow.string()),
            ("attempt", arrow.int32()),
            ("branch", arrow.int32()),
            ("reward", arrow.float64()),
            ("turn_rewards", arrow.list_(arrow.float64())),
            ("stop_reason", arrow.string()),
            ("temperature", arrow.float64()),
            *((name, arrow.list_(getattr(arrow, kind)())) for name, kind in tokens.items()),
            ("versions", arrow.list_(arrow.int64())),
            ("routed_experts", arrow.list_(arrow.int16())),
            ("routed_experts_shape", arrow.list_(arrow.int64())),
        ],
        metadata={"sources": json.dumps(names)},
    )


class Writer:
    """One Parquet file."""

    def __init__(self, arrow: ModuleType, out: Path) -> None:
        self.rows = 0
        """Written so far."""
        self._arrow, self._out, self._schema = arrow, out, schema_of(arrow)

    def write_all(self, reader: RunBufferReader, entries: Sequence[GroupEntry]) -> list[str]:
        """Writes the rows of all entries whose arrays are stored; returns what could not be read, a message each.

        Raises:
            OSError: the disk refused; there is no new file then.
        """
        failed: list[str] = []
        aside = self._out.with_name(f".{self._out.name}.{os.getpid()}")
        try:
            with self._arrow.parquet.ParquetWriter(aside, self._schema, compression="zstd") as file:
                for rows in self._in_pieces(reader, entries, failed):
                    file.write_table(self._arrow.table(self._columns(rows), schema=self._schema))
                    self.rows += len(rows)
            aside.replace(self._out)
        finally:
            aside.unlink(missing_ok=True)
        return failed

    def _in_pieces(
        self, reader: RunBufferReader, entries: Sequence[GroupEntry], failed: list[str]
    ) -> Iterator[list[tuple[GroupEntry, TrainingSample]]]:
        rows: list[tuple[GroupEntry, TrainingSample]] = []
        tokens = 0
        for entry in entries:
            if entry.shelf is None:
                continue
            try:
                group = reader.read_group(entry.group_id)
            except StoreError as error:  # damaged, or deleted by the run that goes on beside us
                failed.append(str(error))
                continue
            for row in group.samples:
                rows.append((entry, row))
                tokens += len(row.token_ids)
                if tokens >= TOKENS:
                    yield rows
                    rows, tokens = [], 0
        if rows:
            yield rows

    def _columns(self, rows: list[tuple[GroupEntry, TrainingSample]]) -> dict[str, Any]:
        entries, samples = zip(*rows, strict=True)
        experts = [None if row.routed_experts is None else row.routed_experts for row in samples]
        return {
            "group_id": [row.group_id for row in samples],
            "task_id": [row.task_id for row in samples],
            "state": [str(entry.state) for entry in entries],
            "reason": [entry.reason for entry in entries],
            "step": [entry.step for entry in entries],
            "rollout_id": [row.rollout_id for row in samples],
            "attempt": [row.attempt for row in samples],
            "branch": [row.branch for row in samples],
            "reward": [row.reward for row in samples],
            "turn_rewards": [list(row.turn_rewards) for row in samples],
            "stop_reason": [row.stop_reason for row in samples],
            "temperature": [row.temperature for row in samples],
            "token_ids": self._lists([row.token_ids for row in samples]),
            "loss_mask": self._lists([row.loss_mask for row in samples]),
            "sources": self._lists([row.sources for row in samples]),
            "logprobs": self._lists([row.logprobs for row in samples], unknown=np.isnan),
            "versions": self._lists([token_versions(row) for row in samples], unknown=_negative),
            "routed_experts": [None if each is None else each.reshape(-1) for each in experts],
            "routed_experts_shape": [None if each is None else list(each.shape) for each in experts],
        }

    def _lists(self, arrays: list[Any], unknown: Any = None) -> Any:
        """Arrays as a column of lists, without a Python object for each token; what is `unknown` is null."""
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        values = np.concatenate(arrays)
        hidden = None if unknown is None else unknown(values)
        return self._arrow.ListArray.from_arrays(offsets, self._arrow.array(values, mask=hidden))


def _negative(values: Any) -> Any:
    return values < 0
