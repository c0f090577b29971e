"""The buffer of one service: groups in segment files, their states in SQLite, both durable before a call returns.

In: groups of finished rollouts (`put`), the trainer's claims and commits, the published versions. Out: whole groups,
oldest first, each leased to one owner at a time. Thread-safe; calls wait for the disk and for each other, never for
groups to come.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from palestra.server.buffer import lineage
from palestra.server.buffer.counts import (
    check_group,
    count_ready,
    count_rollouts,
    count_states,
    counts_to_json,
    measure_depths,
    read_shelves,
    versions_of,
)
from palestra.server.buffer.retention import Retention, unwanted
from palestra.server.buffer.schema import SCHEMA, buffer_path, segments_path
from palestra.server.buffer.segments import Place, SegmentWriter, read_group
from palestra.server.buffer.types import Depth, RestoreReport
from palestra.server.store.database import check_text, open_writer, store_errors, transaction
from palestra.server.store.lock import FileLock
from palestra.server.types import GroupState, LeaseLost, StoreError, TrajectoryGroup
from palestra.server.wire.codec import encode_group

log = logging.getLogger(__name__)

DAMAGED = "damaged"
_IDS = "group_id in (select value from json_each(?))"
_FREE = "owner = null, claim_id = null, lease_until = null"
_PUT = """
    insert or ignore into groups
        (group_id, task_id, group_size, state, reason, versions, segment, offset, length, put_at, ended_at)
    values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_CLAIM = """
    update groups set state = 'claimed', owner = ?, claim_id = ?, lease_until = ? where seq in (
        select seq from groups where state = 'ready' or (state = 'claimed' and lease_until <= ?) order by seq limit ?)
    returning seq, group_id, segment, offset, length"""
_CLAIMED_BEFORE = """
    update groups set lease_until = ? where state = 'claimed' and owner = ? and claim_id = ?
    returning seq, group_id, segment, offset, length"""
_RECOUNT = """
    update counts set rollouts = ?
    where seq = (select seq from groups where group_id = ? and state != 'committed')"""


class EmbeddedBuffer:
    """`Buffer` over a run's store folder: `buffer.db` and `segments/`. One process writes it at a time."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = 64 << 20,
        retention: Retention = Retention(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens or makes the buffer; `retention` says how long `collect` leaves arrays that no restore can need, `clock` gives Unix
        seconds, for leases and ages.

        Raises:
            StoreError: another process writes it, it cannot be opened, or a newer version wrote it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = buffer_path(folder)
        self._clock, self._retention = clock, retention
        self._mutex = threading.RLock()
        self._file_lock = FileLock(self.path.with_suffix(".lock"))
        try:
            self._db = open_writer(self.path, SCHEMA)
            self._segments = SegmentWriter(segments_path(folder), segment_bytes)
            self._remove_unnamed()
        except BaseException:
            self._file_lock.release()
            raise

    def close(self) -> None:
        """Lets go of the files. Nothing needs to be flushed."""
        with self._mutex:
            self._segments.close()
            self._db.close()
            self._file_lock.release()

    # The Buffer Protocol.

    def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Stores groups durably as ready, all or none; a group id that is there already is left alone. Returns how many
        were new. A group with tokens of an abandoned version is recorded as dropped.

        Raises:
            SampleError: a group without rows, with rows of another group, or with a trained row without a reward.
        """
        encoded: dict[str, tuple[TrajectoryGroup, bytes]] = {}
        for group in groups:
            check_group(group)
            encoded.setdefault(group.group_id, (group, encode_group(group)))
        with self._mutex:
            known = self._known(list(encoded))
            fresh = {group_id: pair for group_id, pair in encoded.items() if group_id not in known}
            abandoned = self._abandoned()
            live = [name for name, (group, _) in fresh.items() if abandoned.isdisjoint(versions_of(group))]
            places = self._segments.append([fresh[name][1] for name in live])
            place_of = dict(zip(live, places, strict=True))
            try:
                with transaction(self._db, self.path):
                    for name, (group, _) in fresh.items():
                        if (place := place_of.get(name)) is not None:
                            self._insert(group, GroupState.READY, None, place)
                        else:
                            self._insert(group, GroupState.DROPPED, lineage.ABANDONED, None)
            except BaseException:
                self._segments.take_back(places)
                raise
        return len(fresh)

    def claim(self, n: int, owner: str, ttl_s: float, *, claim_id: str | None = None) -> list[TrajectoryGroup]:
        """Up to `n` ready groups, oldest first, leased to `owner` for `ttl_s` seconds. Leases that ran out are ready.

        With a `claim_id`, a claim that is repeated because its reply was lost gives the same groups, those still held.
        A group whose bytes are damaged is dropped as such, and the next one takes its place.
        """
        if claim_id is not None and (before := self.reclaim(claim_id, owner, ttl_s)):
            return before
        taken: list[TrajectoryGroup] = []
        now = self._clock()
        while len(taken) < n:
            rows = self._take(_CLAIM, (owner, claim_id, now + ttl_s, now, n - len(taken)))
            if not rows:
                break
            taken += self._read(rows)
        return taken

    def reclaim(self, claim_id: str, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        """What `owner` still holds of an earlier claim, its leases extended: the answer to a claim that is repeated because
        its reply was lost. Empty where there was no such claim."""
        return self._read(self._take(_CLAIMED_BEFORE, (self._clock() + ttl_s, owner, claim_id)))

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Extends leases; returns how many `owner` still holds. A lease that ran out is lost once another owner took
        the group."""
        return self._change(
            f"lease_until = ? where state = 'claimed' and owner = ? and {_IDS}",
            (self._clock() + ttl_s, owner, json.dumps(list(group_ids))),
        )

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained in `step`, all or none; returns how many. Repeated, it only gives the count again.

        Raises:
            LeaseLost: `owner` no longer holds all of them; nothing was marked.
        """
        wanted = json.dumps(sorted(set(group_ids)))
        mine = f"{_IDS} and owner = ? and (state = 'claimed' or (state = 'committed' and step = ?))"
        with self._mutex, transaction(self._db, self.path):
            held = {
                row[0] for row in self._db.execute(f"select group_id from groups where {mine}", (wanted, owner, step))
            }
            if missing := sorted(set(group_ids) - held):
                raise LeaseLost(f"{owner} no longer holds {', '.join(missing)}: step {step} was not committed")
            self._db.execute(
                f"update groups set state = 'committed', step = ?, checkpoint_id = ?, ended_at = ?, lease_until = null "
                f"where {_IDS} and state = 'claimed'",
                (step, checkpoint_id, self._clock(), wanted),
            )
        return len(held)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Gives leased groups back unread, in their old order; returns how many."""
        return self._change(
            f"state = 'ready', {_FREE} where state = 'claimed' and owner = ? and {_IDS}",
            (owner, json.dumps(list(group_ids))),
        )

    def drop(self, group_ids: Sequence[str], reason: str) -> int:
        """Takes ready or claimed groups out for good, counted under `reason`; returns how many."""
        return self._change(
            f"state = 'dropped', reason = ?, ended_at = ?, {_FREE} where state in ('ready', 'claimed') and {_IDS}",
            (reason, self._clock(), json.dumps(list(group_ids))),
        )

    # Beyond the Protocol: filtered groups, the lineage of weights, and what lies here.

    def descends(self, versions: Iterable[int]) -> bool:
        """Whether none of these weights was abandoned by a restore: a group with tokens of such is dropped when it is put."""
        with self._mutex:
            return self._abandoned().isdisjoint(versions)

    def dropped(self, reason: str) -> list[str]:
        """Ids of the groups that were dropped for this reason, oldest first."""
        sql = "select group_id from groups where state = 'dropped' and reason = ? order by seq"
        with self._mutex, store_errors(self.path):
            return [row[0] for row in self._db.execute(sql, (reason,))]

    def put_dropped(self, group: TrajectoryGroup, reason: str) -> bool:
        """Records a group that is not to be trained, with its counts and without its arrays. False: its id is there
        already."""
        check_text(group.group_id, group.task_id, reason)
        with self._mutex:
            if self._known([group.group_id]):
                return False
            with transaction(self._db, self.path):
                self._insert(group, GroupState.DROPPED, reason, None)
        return True

    def recount(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Notes the counts of groups whose rows were masked further after they had been put. What was committed keeps the counts that it
        was trained with; ids that nobody put are left alone."""
        values = [(counts_to_json(count_rollouts(group)), group.group_id) for group in groups]
        with self._mutex, transaction(self._db, self.path):
            self._db.executemany(_RECOUNT, values)

    def record_publish(self, version: int, train_step: int) -> None:
        """Notes, before any engine has them, that the weights after `train_step` are published as `version`.

        Raises:
            VersionRefused: the version is not above every earlier one.
        """
        with self._mutex, transaction(self._db, self.path):
            lineage.add_publish(self._db, version, train_step, self._clock())

    def highest_version(self) -> int:
        """The highest version that was ever published; -1 where none was."""
        with self._mutex, store_errors(self.path):
            return lineage.highest_version(self._db)

    def train_step_of(self, version: int) -> int:
        """The train step whose weights were published as `version`; 0 for what was there before the first publish."""
        with self._mutex, store_errors(self.path):
            return lineage.read_versions(self._db).train_step(version)

    def restore(self, train_step: int, policy_version: int) -> RestoreReport:
        """Goes back to a checkpoint taken after `train_step`, whose weights had been published as `policy_version`.

        Groups of later steps and all claimed ones are ready again; those with tokens of weights that the restored run
        never had are dropped as abandoned, also when they are put only later.

        Raises:
            StoreError: a group that would have to be trained again is no longer stored; nothing was changed.
        """
        with self._mutex, transaction(self._db, self.path):
            return lineage.restore(self._db, train_step, policy_version, self._clock())

    def drop_older_than(self, train_step_now: int, max_staleness: int, *, newest: bool = False) -> list[str]:
        """Drops ready groups whose oldest token (with `newest`: whose newest token) was sampled more than `max_staleness` train steps ago,
        as stale; returns their ids."""
        with self._mutex, transaction(self._db, self.path):
            return lineage.take_stale(self._db, train_step_now, max_staleness, newest, self._clock())

    def ready_count(self) -> int:
        """Groups that a claim could take now."""
        with self._mutex, store_errors(self.path):
            return count_ready(self._db, self._clock())

    def counts(self) -> dict[str, int]:
        """Groups by state: ready (expired leases included), claimed, committed, dropped, and each dropped(reason)."""
        with self._mutex, store_errors(self.path):
            return count_states(self._db, self._clock())

    def depths(self) -> dict[str, Depth]:
        """Of the states ready and claimed: how many groups there are, and how long ago they were put."""
        with self._mutex, store_errors(self.path):
            return measure_depths(self._db, self._clock())

    def collect(self, oldest_kept_train_step: int) -> list[str]:
        """Deletes the segments that no restore can need, given the train step of the oldest checkpoint kept, and that the retention does
        not keep for longer; returns their names."""
        with self._mutex:
            now = self._clock()
            with transaction(self._db, self.path):
                lineage.mark_free(self._db, oldest_kept_train_step, now)
                names = unwanted(read_shelves(self._db, self._segments.active), self._retention, now)
                gone = "segment in (select value from json_each(?))"
                self._db.execute(f"update groups set segment = null where {gone}", (json.dumps(names),))
            self._segments.remove(names)
        return names

    def _known(self, ids: list[str]) -> set[str]:
        with store_errors(self.path):
            return {row[0] for row in self._db.execute(f"select group_id from groups where {_IDS}", (json.dumps(ids),))}

    def _abandoned(self) -> frozenset[int]:
        with store_errors(self.path):
            return lineage.read_versions(self._db).abandoned

    def _insert(self, group: TrajectoryGroup, state: GroupState, reason: str | None, place: Place | None) -> None:
        now = self._clock()
        where = (None, None, None) if place is None else (place.segment, place.offset, place.length)
        ended = None if state == GroupState.READY else now
        head = (group.group_id, group.task_id, group.group_size, state, reason, json.dumps(versions_of(group)))
        seq = self._db.execute(_PUT, (*head, *where, now, ended)).lastrowid
        counts = counts_to_json(count_rollouts(group))
        self._db.execute("insert into counts (seq, rollouts) values (?, ?)", (seq, counts))

    def _change(self, change: str, values: tuple[Any, ...]) -> int:
        with self._mutex, transaction(self._db, self.path):
            return self._db.execute(f"update groups set {change}", values).rowcount

    def _take(self, sql: str, values: tuple[Any, ...]) -> list[tuple[str, Place]]:
        with self._mutex, transaction(self._db, self.path):
            rows = sorted(self._db.execute(sql, values).fetchall())
        return [(group_id, Place(*place)) for _, group_id, *place in rows]

    def _read(self, rows: list[tuple[str, Place]]) -> list[TrajectoryGroup]:
        groups = []
        for group_id, place in rows:
            try:
                groups.append(read_group(self._segments.folder, place, group_id))
            except StoreError as error:
                log.error("group %s is dropped: %s", group_id, error)
                self.drop([group_id], DAMAGED)
        return groups

    def _remove_unnamed(self) -> None:
        """Segments that no group names hold writes that were never acknowledged."""
        named = {row[0] for row in self._db.execute("select distinct segment from groups where segment is not null")}
        if unnamed := [name for name in self._segments.names() if name not in named]:
            self._segments.remove(unnamed)
