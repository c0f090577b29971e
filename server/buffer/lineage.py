"""Which weights a token came from, and whether the run still descends from them.

In: the database, inside a transaction of its owner. Out: ages in train steps, groups to be dropped, groups to be
trained again. Versions only grow; after a restore the run publishes the restored weights under a new version, and the
versions of the train steps that were lost are abandoned: groups with their tokens are dropped, those that arrive
later too.
"""

from __future__ import annotations

import json
import sqlite3

from palestra.server.buffer.types import RestoreReport, VersionRefused
from palestra.server.types import StoreError

ABANDONED = "abandoned"
STALE = "stale"
_READY = "(state = 'ready' or (state = 'claimed' and lease_until <= ?))"
_FREE = "owner = null, claim_id = null, lease_until = null"
_AMONG = "seq in (select value from json_each(?))"


def highest_version(db: sqlite3.Connection) -> int:
    """-1 where none was published."""
    return int(db.execute("select coalesce(max(version), -1) from publishes").fetchone()[0])


def add_publish(db: sqlite3.Connection, version: int, train_step: int, now: float) -> None:
    """Raises:
    VersionRefused: `version` is not above every earlier one.
    """
    highest = highest_version(db)
    if version <= highest:
        raise VersionRefused(f"version {version} cannot be published: {highest} was published before, go on above it")
    db.execute("insert into publishes (version, train_step, at) values (?, ?, ?)", (version, train_step, now))


class Versions:
    """What was published so far, as it was read at construction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        rows = db.execute("select version, train_step, abandoned from publishes").fetchall()
        self._steps = {int(version): int(step) for version, step, _ in rows}
        self.abandoned = frozenset(int(version) for version, _, gone in rows if gone)

    def train_step(self, version: int) -> int:
        """The train step whose weights `version` is: its own record's, else the nearest earlier one's, else 0."""
        nearest = max((known for known in self._steps if known <= version), default=None)
        return 0 if nearest is None else self._steps[nearest]

    def oldest_step(self, versions: list[int]) -> int | None:
        """The train step of the oldest weights among `versions`; None where there are none."""
        return min(map(self.train_step, versions), default=None)

    def beyond(self, version: int, train_step: int, policy_version: int) -> bool:
        """Whether `version` is unknown to a run restored to `train_step`, whose weights were `policy_version`.

        A higher one may still be of the same weights: an earlier restore to the same checkpoint published them again.
        """
        if version <= policy_version:
            return version in self.abandoned
        return version in self.abandoned or self._steps.get(version, train_step + 1) > train_step


def take_stale(db: sqlite3.Connection, train_step_now: int, max_staleness: int, now: float) -> list[str]:
    """Drops ready groups whose oldest token is more than `max_staleness` train steps old; returns their ids."""
    versions = Versions(db)
    rows = db.execute(f"select seq, group_id, versions from groups where {_READY} order by seq", (now,)).fetchall()
    stale = []
    for seq, group_id, held in rows:
        oldest = versions.oldest_step(json.loads(held))
        if oldest is not None and train_step_now - oldest > max_staleness:
            stale.append((seq, group_id))
    _drop(db, [seq for seq, _ in stale], STALE, now)
    return [group_id for _, group_id in stale]


def restore(db: sqlite3.Connection, train_step: int, policy_version: int, now: float) -> RestoreReport:
    """Goes back to a checkpoint taken after `train_step`, whose weights were published as `policy_version`.

    Raises:
        StoreError: a group that would have to be trained again is not stored any more: no kept checkpoint preceded it.
    """
    versions = Versions(db)
    rows = db.execute(
        "select seq, group_id, versions, state, segment from groups "
        "where state in ('ready', 'claimed') or (state = 'committed' and step > ?) order by seq",
        (train_step,),
    ).fetchall()
    lost: list[tuple[int, str]] = []
    again: list[tuple[int, str]] = []
    for seq, group_id, held, state, segment in rows:
        if any(versions.beyond(version, train_step, policy_version) for version in json.loads(held)):
            lost.append((seq, group_id))
        elif state != "ready":
            if segment is None:
                raise StoreError(f"group {group_id}, trained after step {train_step}, is not stored any more")
            again.append((seq, group_id))
    _drop(db, [seq for seq, _ in lost], ABANDONED, now)
    db.execute(
        f"update groups set state = 'ready', {_FREE}, step = null, checkpoint_id = null, ended_at = null "
        f"where {_AMONG}",
        (json.dumps([seq for seq, _ in again]),),
    )
    db.execute("update publishes set abandoned = 1 where version > ? and train_step > ?", (policy_version, train_step))
    ids = tuple(group_id for _, group_id in again), tuple(group_id for _, group_id in lost)
    return RestoreReport(*ids, next_version=highest_version(db) + 1)


def _drop(db: sqlite3.Connection, rows: list[int], reason: str, now: float) -> None:
    db.execute(
        f"update groups set state = 'dropped', reason = ?, ended_at = ?, step = null, checkpoint_id = null, {_FREE} "
        f"where {_AMONG}",
        (reason, now, json.dumps(rows)),
    )


def finished_segments(db: sqlite3.Connection, train_step: int, active: str) -> list[str]:
    """Segments, `active` not among them, all of whose groups were dropped or committed in steps up to `train_step`."""
    rows = db.execute(
        "select segment from groups where segment is not null and segment != ? group by segment "
        "having min(state = 'dropped' or (state = 'committed' and step <= ?)) = 1",
        (active, train_step),
    )
    return [str(name) for (name,) in rows]
