"""Reads the buffer of a run that lies in PostgreSQL, beside its service or after it; the database is found by the run's store folder.

In: the store folder, and the password from PGPASSFILE or PGPASSWORD where there is one. Out: what is known of each group, and the rows of
one. Waits for the database, some seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from palestra.server.buffer import pg_sql
from palestra.server.buffer.counts import entry_of
from palestra.server.buffer.pg_link import Link
from palestra.server.buffer.pg_place import place_path, read_place
from palestra.server.buffer.pg_schema import look
from palestra.server.buffer.postgres import as_counts, decode
from palestra.server.buffer.types import GroupEntry
from palestra.server.types import StoreError, TrajectoryGroup


class PostgresReader:
    """Read-only view of one buffer. Thread-safe."""

    def __init__(self, folder: Path, *, deadline_s: float = 10.0) -> None:
        """`deadline_s`: how long the database is waited for, at first and after it went away.

        Raises:
            StoreError: the folder names no database, it cannot be reached, or it does not hold the run.
        """
        place = read_place(folder)
        if place is None:
            raise StoreError(f"{place_path(folder)}: no such file; is this the store folder of a run?")
        self.place = place
        self._link = Link(
            place.url,
            place.url,
            lambda db: look(db, place),
            name=f"palestra reads {place.run}"[:60],
            opening_s=deadline_s,
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()

    def entries(self) -> tuple[GroupEntry, ...]:
        """All groups, in the order in which they were put."""
        return tuple(_entry(row) for row in self._rows(pg_sql.ENTRIES, {}))

    def counts(self) -> dict[str, int]:
        """Groups by state, as `PostgresBuffer.counts` gives them."""
        return as_counts(self._rows(pg_sql.COUNTS, {"now": time.time()}))

    def read_group(self, group_id: str) -> TrajectoryGroup:
        """The rows of one group, whatever its state.

        Raises:
            StoreError: there is no such group, its arrays are no longer stored, or they are damaged.
        """
        found = self._rows(pg_sql.GROUP, {"id": group_id})
        if not found:
            raise StoreError(f"{self.place.url}: no group {group_id} in run {self.place.run}")
        return decode(found[0][0], group_id, self.place.url)

    def publishes(self) -> tuple[tuple[int, int, bool], ...]:
        """(version, train step, whether it was abandoned by a restore), by version."""
        return tuple((version, step, gone) for version, step, gone in self._rows(pg_sql.PUBLISHES, {}))

    def _rows(self, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self._link.call(lambda db: db.execute(query.encode(), values, binary=True).fetchall())


def _entry(row: tuple[Any, ...]) -> GroupEntry:
    *head, versions, rollouts, put_at, ended_at, length, free_at = row
    shelf = None if length is None else head[0]  # each group lies by itself
    return entry_of([*head, rollouts], versions, (put_at, ended_at, shelf, length, free_at))
