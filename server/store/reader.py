"""Reads a turn log by its folder alone: of a live run, or of the files that a finished or killed one left.

In: the store folder. Out: trajectories, sessions, groups and events as they were last made durable. Never blocks the
writer; waits only for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from palestra.server.store.database import open_reader, store_errors
from palestra.server.store.jsonbytes import loads
from palestra.server.store.schema import SCHEMA, turns_path
from palestra.server.store.turnbytes import COLUMNS, turn_of
from palestra.server.store.types import (
    GroupRecord,
    SessionOutcome,
    SessionRecord,
    SessionState,
    StoredEvent,
    StoredSession,
)
from palestra.server.types import GroupState, SessionError, Trajectory

_SESSIONS = """
    select s.rollout_id, s.attempt, s.group_id, s.task_id, s.idx, s.meta, s.state, s.opened_at, s.ended_at,
           s.discard_reason, s.outcome, count(t.id), coalesce(sum(t.tokens), 0),
           coalesce(sum(t.tokens * (1 - t.delivered)), 0)
    from sessions s left join turns t on t.session = s.id {where} group by s.id order by s.id"""


class StoreReader:
    """Read-only view of one turn log. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        StoreError: the folder holds no turn log, or one of a newer version.
        """
        self.path = turns_path(folder)
        self._db = open_reader(self.path, SCHEMA)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the connection."""
        self._db.close()

    def read_trajectory(self, rollout_id: str, attempt: int | None = None) -> Trajectory:
        """One rollout in tokens, of the newest attempt unless told; turns that were not delivered are in it, marked.

        Raises:
            SessionError: there is no such session.
        """
        found = self._rows(
            "select id, attempt, group_id, task_id, truncated, outcome from sessions "
            "where rollout_id = ?1 and (?2 is null or attempt = ?2) order by attempt desc limit 1",
            (rollout_id, attempt),
        )
        if not found:
            which = rollout_id if attempt is None else f"{rollout_id} attempt {attempt}"
            raise SessionError(f"no session {which} in {self.path}", 404, "unknown_session")
        session, number, group_id, task_id, truncated, blob = found[0]
        outcome = _outcome(blob)
        rows = self._rows(f"select {COLUMNS} from turns where session = ? order by idx", (session,))
        return Trajectory(
            rollout_id=rollout_id,
            attempt=number,
            group_id=group_id,
            task_id=task_id,
            turns=tuple(turn_of(row) for row in rows),
            reward=outcome.reward if outcome else None,
            turn_rewards=outcome.turn_rewards if outcome else (),
            stop_reason=outcome.stop_reason if outcome else "",
            truncated=bool(truncated),
        )

    def read_sessions(
        self, *, group_id: str | None = None, rollout_id: str | None = None, state: SessionState | None = None
    ) -> tuple[StoredSession, ...]:
        """Sessions in the order in which they were opened, all of them or those that match."""
        where, values = _where({"s.group_id": group_id, "s.rollout_id": rollout_id, "s.state": state})
        return tuple(_session(row) for row in self._rows(_SESSIONS.format(where=where), values))

    def read_groups(self, state: GroupState | None = None, *, group_id: str | None = None) -> tuple[GroupRecord, ...]:
        """Groups in the order in which they were planned, all of them or those that match."""
        where, values = _where({"state": state, "group_id": group_id})
        rows = self._rows(f"select group_id, task, seed, size, attempt, state from groups {where} order by id", values)
        return tuple(
            GroupRecord(group_id, loads(task), seed, size, attempt, GroupState(now))
            for group_id, task, seed, size, attempt, now in rows
        )

    def read_events(self, rollout_id: str | None = None) -> tuple[StoredEvent, ...]:
        """Events in the order in which they came, of all sessions or of one rollout's."""
        where, values = _where({"s.rollout_id": rollout_id})
        rows = self._rows(
            "select s.rollout_id, s.attempt, e.kind, e.at, e.data from events e join sessions s on s.id = e.session "
            f"{where} order by e.id",
            values,
        )
        return tuple(StoredEvent(rollout, attempt, kind, at, loads(data)) for rollout, attempt, kind, at, data in rows)

    def commits(self) -> int:
        """A number that changes by one with each commit of a writer, as long as this reader is open."""
        return int(self._rows("pragma data_version", ())[0][0])

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock, store_errors(self.path):
            return self._db.execute(sql, values).fetchall()


def _where(equal: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """The conditions that are given (not None) and their values. Only those: beside an `is null or` SQLite would use no index."""
    given = {column: value for column, value in equal.items() if value is not None}
    return ("where " + " and ".join(f"{column} = ?" for column in given) if given else ""), tuple(given.values())


def _outcome(blob: bytes | None) -> SessionOutcome | None:
    return None if blob is None else msgspec.convert(loads(blob), SessionOutcome)


def _session(row: tuple[Any, ...]) -> StoredSession:
    rollout_id, attempt, group_id, task_id, index, meta, state, opened, ended, reason, outcome, turns, tokens, lost = (
        row
    )
    return StoredSession(
        record=SessionRecord(rollout_id, attempt, group_id, task_id, index, loads(meta)),
        state=SessionState(state),
        opened_at=opened,
        ended_at=ended,
        discard_reason=reason,
        outcome=_outcome(outcome),
        turns=turns,
        sampled_tokens=tokens,
        undelivered_tokens=lost,
    )
