"""Reads a buffer by its folder alone: of a live run, or of the files that a finished or killed one left.

In: the store folder. Out: what is known of each group, and the rows of one. Waits only for the disk.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from palestra.server.buffer.counts import count_states, entry_of
from palestra.server.buffer.schema import SCHEMA, buffer_path, segments_path
from palestra.server.buffer.segments import Place, read_group
from palestra.server.buffer.types import GroupEntry
from palestra.server.store.database import open_reader, store_errors
from palestra.server.types import StoreError, TrajectoryGroup


class BufferReader:
    """Read-only view of one buffer. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        StoreError: the folder holds no buffer, or one of a newer version.
        """
        self.path = buffer_path(folder)
        self._segments = segments_path(folder)
        self._db = open_reader(self.path, SCHEMA)
        with store_errors(self.path):
            (version,) = self._db.execute("pragma user_version").fetchone()
        # A file of version 1 has no such column until a writer brings it up to date.
        self._free_at = "free_at" if version > 1 else "null"
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the connection."""
        self._db.close()

    def entries(self) -> tuple[GroupEntry, ...]:
        """All groups, in the order in which they were put."""
        rows = self._rows(
            "select group_id, task_id, group_size, state, reason, step, checkpoint_id, owner, versions, rollouts, "
            f"put_at, ended_at, segment, length, {self._free_at} from groups join counts using (seq) order by seq"
        )
        return tuple(_entry(row) for row in rows)

    def counts(self) -> dict[str, int]:
        """Groups by state, as `EmbeddedBuffer.counts` gives them."""
        with self._lock, store_errors(self.path):
            return count_states(self._db, time.time())

    def read_group(self, group_id: str) -> TrajectoryGroup:
        """The rows of one group, whatever its state.

        Raises:
            StoreError: there is no such group, its arrays are no longer stored, or they are damaged.
        """
        found = self._rows("select segment, offset, length from groups where group_id = ?", (group_id,))
        if not found:
            raise StoreError(f"{self.path}: no group {group_id}")
        if found[0][0] is None:
            raise StoreError(f"{self.path}: the arrays of group {group_id} are not stored")
        return read_group(self._segments, Place(*found[0]), group_id)

    def publishes(self) -> tuple[tuple[int, int, bool], ...]:
        """(version, train step, whether it was abandoned by a restore), by version."""
        rows = self._rows("select version, train_step, abandoned from publishes order by version")
        return tuple((version, step, bool(gone)) for version, step, gone in rows)

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, store_errors(self.path):
            return self._db.execute(sql, values).fetchall()


def _entry(row: tuple[Any, ...]) -> GroupEntry:
    *head, versions, rollouts, put_at, ended_at, segment, length, free_at = row
    return entry_of([*head, rollouts], json.loads(versions), (put_at, ended_at, segment, length, free_at))
