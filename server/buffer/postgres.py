"""The buffer of one run in a PostgreSQL database that many runs and hosts may share. Arrays and states are durable before a call returns.

In: groups of finished rollouts (`put`), the trainer's claims and commits, the published versions. Out: whole groups, oldest first, each
leased to one owner at a time. Thread-safe; calls wait for the database and for each other, never for groups to come.

One connection does everything and holds the run's lock. So nothing is ever written by a service that lost the run to another one, and no
more than one transaction can be in doubt when a connection is lost before its commit was acknowledged: each writes a token of its own into
`last_call`, and the next connection finds there whether it came through. Its result is given then, else it is done again. A token of
somebody else there means that the run was written by others meanwhile, or that the database went back: then nothing more is written.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from palestra.server.buffer import pg_lineage, pg_sql
from palestra.server.buffer.counts import check_group, count_rollouts, counts_to_json, versions_of
from palestra.server.buffer.embedded import DAMAGED
from palestra.server.buffer.pg_link import Db, Link
from palestra.server.buffer.pg_place import note_place
from palestra.server.buffer.pg_schema import own
from palestra.server.buffer.retention import Retention
from palestra.server.buffer.types import Depth, RestoreReport
from palestra.server.types import LeaseLost, StoreError, TrajectoryGroup
from palestra.server.wire.codec import decode_group, encode_group

log = logging.getLogger(__name__)

T = TypeVar("T")
Rows = list[tuple[str, bytes | None]]
"""Ids of groups with their bytes; None where they are gone."""


class PostgresBuffer:
    """`RunBuffer` in a PostgreSQL database. One service writes a run at a time; it is named in the run's store folder for readers."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        folder: Path,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.time,
        opening_s: float = 10.0,
        deadline_s: float = 60.0,
    ) -> None:
        """Opens or makes the buffer of `run`. `opening_s`: how long the database is waited for at first, and for the lock of a service that
        has just died; `deadline_s`: how long it may be away later. `clock` gives Unix seconds, for leases and ages.

        Raises:
            StoreError: the database cannot be reached or refuses us, another service writes the run, the run is of another folder, or a
                newer build wrote it.
        """
        self.place = note_place(folder, url, run)
        self._clock, self._retention = clock, retention
        self._known: int | None = None
        """The token of the last transaction that is known to be in the database; None before the first connection."""
        self._doubtful: int | None = None
        """The token of a transaction that may be there."""
        self._link = Link(
            url,
            self.place.url,
            self._own,
            name=f"palestra {run}"[:60],
            opening_s=opening_s,
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        """Ends the connection. Nothing needs to be flushed."""
        self._link.close()

    # The Buffer Protocol.

    def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Stores groups durably as ready, all or none; a group id that is there already is left alone. Returns how many were new. A group
        with tokens of an abandoned version is recorded as dropped.

        Raises:
            SampleError: a group without rows, with rows of another group, or with a trained row without a reward.
        """
        rows: dict[str, dict[str, Any]] = {}
        for group in groups:
            check_group(group)
            rows.setdefault(group.group_id, {**self._row(group), "data": encode_group(group)})

        def insert(db: Db) -> int:
            with db.pipeline():
                cursors = [db.execute(pg_sql.PUT, row) for row in rows.values()]
            return sum(int(row[0]) for cursor in cursors for row in cursor.fetchall())

        return self._change(insert)

    def claim(self, n: int, owner: str, ttl_s: float, *, claim_id: str | None = None) -> list[TrajectoryGroup]:
        """Up to `n` ready groups, oldest first, leased to `owner` for `ttl_s` seconds. Leases that ran out are ready.

        With a `claim_id`, a claim that is repeated because its reply was lost gives the same groups, those still held. A group whose bytes
        are damaged is dropped as such, and the next one takes its place.
        """
        if claim_id is not None and (before := self.reclaim(claim_id, owner, ttl_s)):
            return before
        taken: list[TrajectoryGroup] = []
        now = self._clock()
        values = {"owner": owner, "claim_id": claim_id, "until": now + ttl_s, "now": now}
        while len(taken) < n:
            rows = self._take(pg_sql.CLAIM, {**values, "n": n - len(taken)})
            if not rows:
                break
            taken += self._read(rows)
        return taken

    def reclaim(self, claim_id: str, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        """What `owner` still holds of an earlier claim, its leases extended: the answer to a claim that is repeated because its reply was
        lost. Empty where there was no such claim."""
        values = {"owner": owner, "claim_id": claim_id, "until": self._clock() + ttl_s}
        return self._read(self._take(pg_sql.RECLAIM, values))

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Extends leases; returns how many `owner` still holds. A lease that ran out is lost once another owner took the group."""
        return self._count(pg_sql.RENEW, group_ids, owner=owner, until=self._clock() + ttl_s)

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained in `step`, all or none; returns how many. Repeated, it only gives the count again.

        Raises:
            LeaseLost: `owner` no longer holds all of them; nothing was marked.
        """
        wanted = sorted(set(group_ids))
        values = {"ids": wanted, "owner": owner, "step": step, "checkpoint_id": checkpoint_id, "now": self._clock()}

        def mark(db: Db) -> int:
            held = {group_id for (group_id,) in db.execute(pg_sql.COMMIT, values).fetchall()}
            if len(held) < len(wanted):
                held |= {group_id for (group_id,) in db.execute(pg_sql.COMMITTED_BEFORE, values).fetchall()}
            if missing := [group_id for group_id in wanted if group_id not in held]:
                raise LeaseLost(f"{owner} no longer holds {', '.join(missing)}: step {step} was not committed")
            return len(held)

        return self._change(mark)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Gives leased groups back unread, in their old order; returns how many."""
        return self._count(pg_sql.RELEASE, group_ids, owner=owner)

    def drop(self, group_ids: Sequence[str], reason: str) -> int:
        """Takes ready or claimed groups out for good, counted under `reason`; returns how many."""
        return self._count(pg_sql.DROP, group_ids, reason=reason, now=self._clock())

    # Beyond the Protocol: filtered groups, the lineage of weights, and what lies here.

    def descends(self, versions: Iterable[int]) -> bool:
        """Whether none of these weights was abandoned by a restore."""
        return self._link.call(lambda db: pg_sql.read_versions(db).abandoned).isdisjoint(versions)

    def dropped(self, reason: str) -> list[str]:
        """Ids of the groups that were dropped for this reason, oldest first."""
        return [group_id for (group_id,) in self._rows(pg_sql.DROPPED, {"reason": reason})]

    def put_dropped(self, group: TrajectoryGroup, reason: str) -> bool:
        """Records a group that is not to be trained, with its counts and without its arrays. False: its id is there already."""
        row = {**self._row(group), "reason": reason}
        return self._change(lambda db: pg_sql.number(db, pg_sql.PUT_DROPPED, row)) == 1

    def recount(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Notes the counts of groups whose rows were masked further after they had been put. What was committed keeps the counts that it
        was trained with; ids that nobody put are left alone."""
        rows = [{"group_id": group.group_id, "counts": counts_to_json(count_rollouts(group))} for group in groups]
        self._change(lambda db: db.cursor().executemany(pg_sql.RECOUNT, rows))

    def record_publish(self, version: int, train_step: int) -> None:
        """Notes, before any engine has them, that the weights after `train_step` are published as `version`.

        Raises:
            VersionRefused: the version is not above every earlier one.
        """
        self._change(lambda db: pg_lineage.add_publish(db, version, train_step, self._clock()))

    def highest_version(self) -> int:
        """The highest version that was ever published; -1 where none was."""
        return self._link.call(lambda db: pg_sql.number(db, pg_sql.HIGHEST))

    def train_step_of(self, version: int) -> int:
        """The train step whose weights were published as `version`; 0 for what was there before the first publish."""
        return self._link.call(lambda db: pg_sql.number(db, pg_sql.STEP_OF, {"version": version}))

    def restore(self, train_step: int, policy_version: int) -> RestoreReport:
        """Goes back to a checkpoint taken after `train_step`, whose weights had been published as `policy_version`.

        Groups of later steps and all claimed ones are ready again; those with tokens of weights that the restored run never had are dropped
        as abandoned, also when they are put only later.

        Raises:
            StoreError: a group that would have to be trained again is no longer stored; nothing was changed.
        """
        return self._change(lambda db: pg_lineage.restore(db, train_step, policy_version, self._clock()))

    def drop_older_than(self, train_step_now: int, max_staleness: int, *, newest: bool = False) -> list[str]:
        """Drops ready groups whose oldest token (with `newest`: whose newest token) was sampled more than `max_staleness` train steps ago,
        as stale; returns their ids."""
        return self._change(lambda db: pg_lineage.take_stale(db, train_step_now, max_staleness, newest, self._clock()))

    def ready_count(self) -> int:
        """Groups that a claim could take now."""
        return self._link.call(lambda db: pg_sql.number(db, pg_sql.READY_COUNT, {"now": self._clock()}))

    def counts(self) -> dict[str, int]:
        """Groups by state: ready (expired leases included), claimed, committed, dropped, and each dropped(reason)."""
        return as_counts(self._rows(pg_sql.COUNTS, {"now": self._clock()}))

    def depths(self) -> dict[str, Depth]:
        """Of the states ready and claimed: how many groups there are, and how long ago they were put."""
        depths = dict.fromkeys(("ready", "claimed"), Depth(0, 0.0, 0.0))
        for state, n, oldest, mean in self._rows(pg_sql.DEPTHS, {"now": self._clock()}):
            depths[state] = Depth(n, max(oldest, 0.0), max(mean, 0.0))
        return depths

    def collect(self, oldest_kept_train_step: int) -> list[str]:
        """Deletes the arrays that no restore can need, given the train step of the oldest checkpoint kept, and that the retention does not
        keep for longer; returns the ids of their groups."""
        return self._change(lambda db: pg_lineage.clear(db, oldest_kept_train_step, self._retention, self._clock()))

    def _own(self, db: Db) -> None:
        """Makes a new connection the run's writer, and finds out what came through of what the last one did."""
        own(db, self.place)
        last = pg_sql.number(db, pg_sql.LAST_CALL)
        if self._known is not None and last not in (self._known, self._doubtful):
            raise StoreError(
                f"{self.place.url}: run {self.place.run} is not as this service left it: another one wrote it meanwhile, or the database "
                "was set back to an earlier state; go on with --resume"
            )
        self._known = last

    def _change(self, body: Callable[[Db], T]) -> T:
        """Does `body` in one transaction, exactly once, however often the connection is lost."""
        token = secrets.randbits(62)
        done: list[T] = []
        """Its result, once the commit may have been sent."""

        def attempt(db: Db) -> T:
            if done and self._known == token:
                return done[0]
            done.clear()
            self._doubtful = token
            with db.transaction():
                result = body(db)
                db.execute(pg_sql.NOTE_CALL, (token,))
                done.append(result)
            self._known = token
            return result

        return self._link.call(attempt)

    def _rows(self, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        return self._link.call(lambda db: db.execute(query.encode(), values, binary=True).fetchall())

    def _count(self, query: str, group_ids: Sequence[str], **values: Any) -> int:
        """How many of the groups a statement changed."""
        ids = list(group_ids)
        return self._change(lambda db: db.execute(query.encode(), {"ids": ids, **values}).rowcount)

    def _take(self, query: str, values: dict[str, Any]) -> Rows:
        return self._change(lambda db: db.execute(query.encode(), values, binary=True).fetchall())

    def _read(self, rows: Rows) -> list[TrajectoryGroup]:
        groups = []
        for group_id, data in rows:
            try:
                groups.append(decode(data, group_id, self.place.url))
            except StoreError as error:
                log.error("group %s is dropped: %s", group_id, error)
                self.drop([group_id], DAMAGED)
        return groups

    def _row(self, group: TrajectoryGroup) -> dict[str, Any]:
        return {
            "group_id": group.group_id,
            "task_id": group.task_id,
            "group_size": group.group_size,
            "versions": versions_of(group),
            "counts": counts_to_json(count_rollouts(group)),
            "now": self._clock(),
        }


def as_counts(rows: Iterable[tuple[Any, ...]]) -> dict[str, int]:
    """Rows of state, reason and number, as `RunBuffer.counts` gives them."""
    counts = dict.fromkeys(("ready", "claimed", "committed", "dropped"), 0)
    for state, reason, n in rows:
        counts[state] += n
        if state == "dropped":
            counts[f"dropped({reason})"] = n
    return counts


def decode(data: bytes | None, group_id: str, where: str) -> TrajectoryGroup:
    """The group of a row's bytes.

    Raises:
        StoreError: they are gone, damaged, or of another group.
    """
    if data is None:
        raise StoreError(f"{where}: the arrays of group {group_id} are not stored")
    try:
        group = decode_group(data, ours=True)
    except StoreError as error:
        raise StoreError(f"{where}: arrays of group {group_id}: {error}") from error
    if group.group_id != group_id:
        raise StoreError(f"{where}: group {group.group_id} lies at the place of {group_id}")
    return group
