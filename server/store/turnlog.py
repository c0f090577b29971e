"""The recorder's memory: every session and every turn, durable before a reply leaves.

In: sessions, turns and outcomes from the service's event loop. Out: a future for each write, done when the disk has
it; reads through `reader`. Waits for the disk only, in a thread of its own (see `commit`). An error of the disk fails
the writes of that batch and no others; what was acknowledged before is untouched, and the log works again as soon as
the disk does.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra.server.store.commit import GroupCommit
from palestra.server.store.database import check_text, open_writer
from palestra.server.store.jsonbytes import dumps
from palestra.server.store.lock import FileLock
from palestra.server.store.reader import StoreReader
from palestra.server.store.schema import SCHEMA, turns_path
from palestra.server.store.turnbytes import COLUMNS, check_turn, turn_values
from palestra.server.store.types import GroupRecord, SessionOutcome, SessionRecord, SessionState
from palestra.server.types import GroupState, SessionError, Turn

_APPEND = (
    f"insert into turns (session, {COLUMNS}) select id, {', '.join('?' * len(COLUMNS.split(',')))} "
    "from sessions where rollout_id = ? and attempt = ? and (state = 'open' or ?)"
)


class TurnLog:
    """The one writer of a store folder's `turns.db`. Writes are called on one event loop and give futures.

    Every write raises StoreError at once where a text cannot be stored, and its future raises StoreError where the disk failed.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Opens or makes the log; `clock` gives Unix seconds.

        Raises:
            StoreError: another process writes it, it cannot be opened, or a newer version wrote it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = turns_path(folder)
        self._clock = clock
        self._lock = FileLock(self.path.with_suffix(".lock"))
        try:
            self._commit = GroupCommit(open_writer(self.path, SCHEMA), self.path)
            self.reader = StoreReader(folder)
        except BaseException:
            self._lock.release()
            raise

    async def close(self) -> None:
        """Waits until everything submitted is durable, then lets go of the files."""
        self.reader.close()  # first: the last connection folds the write-ahead log into the file, and a reader cannot
        await self._commit.close()
        self._lock.release()

    def open_session(self, record: SessionRecord) -> asyncio.Future[None]:
        """Stores a new open session. The future raises SessionError where `(rollout_id, attempt)` is there already."""
        check_text(record.rollout_id, record.group_id, record.task_id)
        key = (record.rollout_id, record.attempt)
        values = (
            *key,
            record.group_id,
            record.task_id,
            record.index,
            SessionState.OPEN,
            self._clock(),
            dumps(record.meta),
        )

        def write(db: sqlite3.Connection) -> None:
            try:
                db.execute(
                    "insert into sessions (rollout_id, attempt, group_id, task_id, idx, state, opened_at, meta) "
                    "values (?, ?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
            except sqlite3.IntegrityError as error:
                raise SessionError(f"session {_name(key)} was opened before", 409, "session_exists") from error

        return self._commit.submit(write)

    def append_turn(self, rollout_id: str, attempt: int, turn: Turn) -> asyncio.Future[None]:
        """Stores one turn. The future raises SessionError where the session has a turn of that index, or is not open: an ended session
        only takes turns that were not delivered, so that their tokens are accounted for.

        Raises:
            SampleError: at once, where ids, logprobs and version spans do not fit each other.
        """
        check_turn(turn)
        check_text(turn.finish_reason, turn.fork_reason, turn.ill_formed)
        key, at = (rollout_id, attempt), self._clock()
        values = (*turn_values(turn, at), rollout_id, attempt, int(not turn.delivered))

        def write(db: sqlite3.Connection) -> None:
            try:
                if not db.execute(_APPEND, values).rowcount:
                    raise SessionError(f"session {_name(key)} is not open", 409, "session_closed")
            except sqlite3.IntegrityError as error:
                raise SessionError(
                    f"session {_name(key)} has a turn {turn.index} already", 409, "turn_exists"
                ) from error
            if turn.fork_reason is not None:
                _add_event(db, key, "fork", at, dumps({"turn": turn.index, "reason": turn.fork_reason}))

        return self._commit.submit(write)

    def mark_delivered(self, rollout_id: str, attempt: int, turn_index: int, delivered: bool) -> asyncio.Future[None]:
        """Notes whether the reply of a turn reached its caller: one that did not is not trained. Repeating it does no harm."""
        key = (rollout_id, attempt)

        def write(db: sqlite3.Connection) -> None:
            changed = db.execute(
                "update turns set delivered = ? where idx = ? "
                "and session = (select id from sessions where rollout_id = ? and attempt = ?)",
                (int(delivered), turn_index, *key),
            ).rowcount
            if not changed:
                raise SessionError(f"session {_name(key)} has no turn {turn_index}", 404, "unknown_turn")

        return self._commit.submit(write)

    def close_session(self, rollout_id: str, attempt: int, outcome: SessionOutcome) -> asyncio.Future[bool]:
        """Ends an open session with its outcome. The future gives False where it had ended before: the first end
        stands."""
        if outcome.reward is not None and not math.isfinite(outcome.reward):
            outcome = replace(outcome, reward=None)
        check_text(outcome.stop_reason)
        parts = {name: getattr(outcome, name) for name in SessionOutcome.__slots__}
        values = (
            SessionState.CLOSED,
            self._clock(),
            outcome.reward,
            outcome.stop_reason,
            int(outcome.truncated),
            dumps(parts),
            rollout_id,
            attempt,
        )

        def write(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                "update sessions set state = ?, ended_at = ?, reward = ?, stop_reason = ?, truncated = ?, outcome = ? "
                "where rollout_id = ? and attempt = ? and state = 'open'",
                values,
            ).rowcount
            return bool(changed) or _known(db, (rollout_id, attempt))

        return self._commit.submit(write)

    def discard_session(self, rollout_id: str, attempt: int, reason: str) -> asyncio.Future[bool]:
        """Takes an open or closed session out for good, its tokens counted under `reason`. False: it was discarded
        before."""
        check_text(reason)
        values = (SessionState.DISCARDED, self._clock(), reason, rollout_id, attempt)

        def write(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                "update sessions set state = ?, ended_at = ?, discard_reason = ? "
                "where rollout_id = ? and attempt = ? and state != 'discarded'",
                values,
            ).rowcount
            return bool(changed) or _known(db, (rollout_id, attempt))

        return self._commit.submit(write)

    def add_event(self, rollout_id: str, attempt: int, kind: str, data: Mapping[str, Any]) -> asyncio.Future[None]:
        """Notes something that is no turn. Forks are noted by `append_turn` itself."""
        check_text(kind)
        at, blob = self._clock(), dumps(data)
        return self._commit.submit(lambda db: _add_event(db, (rollout_id, attempt), kind, at, blob))

    def put_group(self, group: GroupRecord) -> asyncio.Future[bool]:
        """Stores a planned group. The future gives False where its id is there already, which is left alone."""
        check_text(group.group_id)
        values = (group.group_id, dumps(group.task), group.seed, group.size, group.attempt, group.state)
        sql = "insert or ignore into groups (group_id, task, seed, size, attempt, state) values (?, ?, ?, ?, ?, ?)"
        return self._commit.submit(lambda db: bool(db.execute(sql, values).rowcount))

    def update_group(
        self, group_id: str, *, state: GroupState | None = None, attempt: int | None = None
    ) -> asyncio.Future[bool]:
        """Changes a group's state or attempt. The future gives False where there is no such group."""
        sql = "update groups set state = coalesce(?, state), attempt = coalesce(?, attempt) where group_id = ?"
        return self._commit.submit(lambda db: bool(db.execute(sql, (state, attempt, group_id)).rowcount))


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]} attempt {key[1]}"


def _known(db: sqlite3.Connection, key: tuple[str, int]) -> bool:
    """False for a session that is there. Raises SessionError for one that is not."""
    if not db.execute("select 1 from sessions where rollout_id = ? and attempt = ?", key).fetchone():
        raise SessionError(f"no session {_name(key)}", 404, "unknown_session")
    return False


def _add_event(db: sqlite3.Connection, key: tuple[str, int], kind: str, at: float, data: bytes) -> None:
    changed = db.execute(
        "insert into events (session, kind, at, data) "
        "select id, ?, ?, ? from sessions where rollout_id = ? and attempt = ?",
        (kind, at, data, *key),
    ).rowcount
    if not changed:
        raise SessionError(f"no session {_name(key)}", 404, "unknown_session")
