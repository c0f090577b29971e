"""What a change of weights does to the groups in PostgreSQL: publishes, staleness, a restore, and which arrays may go.

The rules are those of `lineage` and `retention`; here they are applied to PostgreSQL's rows. In: a connection inside a transaction of its
owner. Out: ids of groups, a report.
"""

from __future__ import annotations

from palestra.server.buffer import pg_sql
from palestra.server.buffer.lineage import ABANDONED, STALE
from palestra.server.buffer.pg_link import Db
from palestra.server.buffer.retention import Retention, Shelf, unwanted
from palestra.server.buffer.types import RestoreReport, VersionRefused
from palestra.server.types import StoreError


def add_publish(db: Db, version: int, train_step: int, now: float) -> None:
    """Raises:
    VersionRefused: `version` is not above every earlier one.
    """
    highest = pg_sql.number(db, pg_sql.HIGHEST)
    if version <= highest:
        raise VersionRefused(f"version {version} cannot be published: {highest} was published before, go on above it")
    db.execute(pg_sql.PUBLISH, {"version": version, "step": train_step, "now": now})


def take_stale(db: Db, train_step_now: int, max_staleness: int, newest: bool, now: float) -> list[str]:
    """Drops ready groups whose oldest token (with `newest`: whose newest token) is more than `max_staleness` train steps old; returns
    their ids."""
    versions = pg_sql.read_versions(db)
    stale = [
        (seq, group_id)
        for seq, group_id, held in db.execute(pg_sql.WAITING, {"now": now}, binary=True).fetchall()
        if versions.is_stale(held, train_step_now, max_staleness, newest)
    ]
    _drop(db, [seq for seq, _ in stale], STALE, now)
    return [group_id for _, group_id in stale]


def restore(db: Db, train_step: int, policy_version: int, now: float) -> RestoreReport:
    """Goes back to a checkpoint taken after `train_step`, whose weights were published as `policy_version`.

    Raises:
        StoreError: a group that would have to be trained again is not stored any more: no kept checkpoint preceded it.
    """
    versions = pg_sql.read_versions(db)
    lost: list[tuple[int, str]] = []
    again: list[tuple[int, str]] = []
    rows = db.execute(pg_sql.UNDONE_BY_RESTORE, {"step": train_step}, binary=True).fetchall()
    for seq, group_id, held, state, is_stored in rows:
        if any(versions.beyond(version, train_step, policy_version) for version in held):
            lost.append((seq, group_id))
        elif state != "ready":
            if not is_stored:
                raise StoreError(f"group {group_id}, trained after step {train_step}, is not stored any more")
            again.append((seq, group_id))
    _drop(db, [seq for seq, _ in lost], ABANDONED, now)
    db.execute(pg_sql.READY_ROWS, {"rows": [seq for seq, _ in again]})
    db.execute(pg_sql.ABANDON, {"version": policy_version, "step": train_step})
    ids = tuple(group_id for _, group_id in again), tuple(group_id for _, group_id in lost)
    return RestoreReport(*ids, next_version=pg_sql.number(db, pg_sql.HIGHEST) + 1)


def clear(db: Db, train_step: int, retention: Retention, now: float) -> list[str]:
    """Deletes arrays that no checkpoint from `train_step` on needs and that `retention` does not keep; returns the ids of their groups.
    Each group lies on a shelf of its own."""
    db.execute(pg_sql.MARK_FREE, {"step": train_step, "now": now})
    shelves = [Shelf(*row) for row in db.execute(pg_sql.SHELVES, binary=True).fetchall()]
    names = unwanted(shelves, retention, now)
    db.execute(pg_sql.CLEAR, {"ids": names})
    return names


def _drop(db: Db, rows: list[int], reason: str, now: float) -> None:
    db.execute(pg_sql.DROP_ROWS, {"rows": rows, "reason": reason, "now": now})
