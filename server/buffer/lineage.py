"""Which weights a token came from, and whether the run still descends from them.

In: the database, inside a transaction of its owner. Out: ages in train steps, groups to be dropped, groups to be
trained again. Versions only grow; after a restore the run publishes the restored weights under a new version, and the
versions of the train steps that were lost are abandoned: groups with their tokens are dropped, those that arrive
later too.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

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
    """What was published so far."""

    def __init__(self, rows: Iterable[tuple[int, int, bool | int]]) -> None:
        """`rows`: version, train step, and whether a restore abandoned it, of each publish."""
        known = list(rows)
        self._steps = {int(version): int(step) for version, step, _ in known}
        self.abandoned = frozenset(int(version) for version, _, gone in known if gone)

    def train_step(self, version: int) -> int:
        """The train step whose weights `version` is: its own record's, else the nearest earlier one's, else 0."""
        nearest = max((known for known in self._steps if known <= version), default=None)
        return 0 if nearest is None else self._steps[nearest]

    def is_stale(self, versions: Iterable[int], train_step_now: int, max_staleness: int, newest: bool) -> bool:
        """Whether the oldest of `versions` (with `newest`: even the newest) is of weights more than `max_staleness` train steps ago. What
        was sampled by nothing is never stale."""
        steps = [self.train_step(version) for version in versions]
        if not steps:
            return False
        return train_step_now - (max(steps) if newest else min(steps)) > max_staleness

    def beyond(self, version: int, train_step: int, policy_version: int) -> bool:
        """Whether `version` is unknown to a run restored to `train_step`, whose weights were `policy_version`.

        A higher one may still be of the same weights: an earlier restore to the same checkpoint published them again.
        """
        if version <= policy_version:
            return version in self.abandoned
        return version in self.abandoned or self._steps.get(version, train_step + 1) > train_step


def read_versions(db: sqlite3.Connection) -> Versions:
    """What was published, as it stands."""
    return Versions(db.execute("select version, train_step, abandoned from publishes").fetchall())


def take_stale(db: sqlite3.Connection, train_step_now: int, max_staleness: int, newest: bool, now: float) -> list[str]:
    """Drops ready groups whose oldest token (with `newest`: whose newest token) is more than `max_staleness` train steps old; returns
    their ids."""
    versions = read_versions(db)
    rows = db.execute(f"select seq, group_id, versions from groups where {_READY} order by seq", (now,)).fetchall()
    stale = [
        (seq, group_id)
        for seq, group_id, held in rows
        if versions.is_stale(json.loads(held), train_step_now, max_staleness, newest)
    ]
    _drop(db, [seq for seq, _ in stale], STALE, now)
    return [group_id for _, group_id in stale]


def restore(db: sqlite3.Connection, train_step: int, policy_version: int, now: float) -> RestoreReport:
    """Goes back to a checkpoint taken after `train_step`, whose weights were published as `policy_version`.

    Raises:
        StoreError: a group that would have to be trained again is not stored any more: no kept checkpoint preceded it.
    """
    versions = read_versions(db)
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
        f"update groups set state = 'ready', {_FREE}, step = null, checkpoint_id = null, ended_at = null, "
        f"free_at = null where {_AMONG}",
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


def mark_free(db: sqlite3.Connection, train_step: int, now: float) -> None:
    """Notes which arrays no restore can need any more, given the train step of the oldest checkpoint kept."""
    db.execute(
        "update groups set free_at = ? where segment is not null and free_at is null "
        "and (state = 'dropped' or (state = 'committed' and step <= ?))",
        (now, train_step),
    )
