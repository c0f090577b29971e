"""Counts the sampled tokens of a group's rows, for the ledger, and checks what the buffer asks of a group beyond laws
1 and 2.

In: a group. Out: counts per rollout, as records and as JSON, and what a store's row says of a group. Nothing is waited for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.server.buffer.retention import Shelf
from palestra.server.buffer.types import Depth, GroupEntry, RolloutCounts
from palestra.server.store.jsonbytes import dumps, loads
from palestra.server.types import SAMPLED, SAMPLED_SOURCES, GroupState, SampleError, TokenSource, TrajectoryGroup

BY_HAND = "by_mask"
"""Name in the ledger of sampled tokens that a mask made by hand leaves out."""
_COUNTED = {
    int(source): BY_HAND if source == TokenSource.SAMPLED else source.name.lower()
    for source in sorted(SAMPLED_SOURCES - {TokenSource.SHARED})
}
"""Names in the ledger by source. Plain ints: numpy compares bytes with an IntEnum several times slower."""


def count_rollouts(group: TrajectoryGroup) -> tuple[RolloutCounts, ...]:
    """The counts of each rollout that has rows, in the order of the rows."""
    trained: dict[tuple[str, int], int] = {}
    masked: dict[tuple[str, int], dict[str, int]] = {}
    rewards: dict[tuple[str, int], float | None] = {}
    for row in group.samples:
        key = (row.rollout_id, row.attempt)
        rewards[key] = row.reward
        names = masked.setdefault(key, {})
        trained.setdefault(key, 0)
        # Twice the source, and one more where the mask is on.
        kinds = row.sources.astype(np.int64)
        kinds <<= 1
        kinds += row.loss_mask != 0
        found = np.bincount(kinds, minlength=2).tolist()
        for source, name in _COUNTED.items():
            left_out, on = (*found[2 * source : 2 * source + 2], 0, 0)[:2]
            if source == SAMPLED:
                trained[key] += on
            if left_out:
                names[name] = names.get(name, 0) + left_out
    return tuple(RolloutCounts(*key, rewards[key], trained[key], masked[key]) for key in trained)


def counts_to_json(counts: tuple[RolloutCounts, ...]) -> bytes:
    """For the database."""
    return dumps([[c.rollout_id, c.attempt, c.reward, c.trained, c.masked] for c in counts])


def counts_from_json(data: bytes) -> tuple[RolloutCounts, ...]:
    """What `counts_to_json` wrote."""
    return tuple(RolloutCounts(*item) for item in loads(data))


def entry_of(row: Sequence[Any], versions: Sequence[int], stored: Sequence[Any]) -> GroupEntry:
    """What is known of one group. `row`: id, task, size, state, reason, step, checkpoint, owner, and the counts as JSON; `stored`: when it
    was put and ended, shelf (None where its arrays are gone), their length, and since when they are free."""
    group_id, task_id, size, state, reason, step, checkpoint_id, owner, rollouts = row
    put_at, ended_at, shelf, length, free_at = stored
    return GroupEntry(
        group_id=group_id,
        task_id=task_id,
        group_size=size,
        state=GroupState(state),
        reason=reason,
        step=step,
        checkpoint_id=checkpoint_id,
        owner=owner,
        versions=tuple(versions),
        rollouts=counts_from_json(rollouts),
        put_at=put_at,
        ended_at=ended_at,
        shelf=shelf,
        stored_bytes=length if shelf is not None else 0,
        free_at=free_at,
    )


def versions_of(group: TrajectoryGroup) -> list[int]:
    """The policy versions of all sampled tokens, ascending."""
    return sorted({span.version for row in group.samples for span in row.spans if span.end > span.start})


def check_group(group: TrajectoryGroup) -> None:
    """Raises:
    SampleError: no rows, a row of another group, a row twice, or a trained row without a reward.
    """
    where = f"group {group.group_id}"
    if not group.samples:
        raise SampleError(f"{where}: no rows; record it as dropped instead")
    seen: set[tuple[str, int, int]] = set()
    for row in group.samples:
        name = f"row {row.rollout_id}/{row.attempt} branch {row.branch}"
        key = (row.rollout_id, row.attempt, row.branch)
        if row.group_id != group.group_id:
            raise SampleError(f"{where}: {name} is of group {row.group_id}")
        if key in seen:
            raise SampleError(f"{where}: {name} is there twice")
        if row.reward is None and ((row.loss_mask != 0) & (row.sources == SAMPLED)).any():
            raise SampleError(f"{where}: {name} is trained on although its reward is unknown")
        seen.add(key)


def count_ready(db: sqlite3.Connection, now: float) -> int:
    """Groups that could be claimed at a time. Reads the index alone, since it is asked for often."""
    sql = "select count(*) from groups where state = 'ready' or (state = 'claimed' and lease_until <= ?)"
    return int(db.execute(sql, (now,)).fetchone()[0])


def count_states(db: sqlite3.Connection, now: float) -> dict[str, int]:
    """Groups by state at a time, leases that ran out as ready; the dropped ones once more by reason, as
    dropped(reason)."""
    counts = dict.fromkeys(("ready", "claimed", "committed", "dropped"), 0)
    rows = db.execute(
        "select iif(state = 'claimed' and lease_until <= ?, 'ready', state) as now, reason, count(*) from groups "
        "group by now, reason order by now, reason",
        (now,),
    )
    for state, reason, n in rows:
        counts[state] += n
        if state == "dropped":
            counts[f"dropped({reason})"] = n
    return counts


def measure_depths(db: sqlite3.Connection, now: float) -> dict[str, Depth]:
    """Of the groups that wait and of those that are leased out: how many there are, and for how long."""
    depths = dict.fromkeys(("ready", "claimed"), Depth(0, 0.0, 0.0))
    rows = db.execute(
        "select iif(state = 'claimed' and lease_until > ?, 'claimed', 'ready') as now, count(*), min(put_at), avg(put_at) "
        "from groups where state in ('ready', 'claimed') group by now",
        (now,),
    )
    for state, n, first, mean in rows:
        depths[state] = Depth(n, max(now - first, 0.0), max(now - mean, 0.0))
    return depths


def read_shelves(db: sqlite3.Connection, active: str) -> list[Shelf]:
    """The segments that groups lie in, oldest first. Of the `active` one nothing is free: it is written to."""
    rows = db.execute(
        "select segment, sum(length), iif(count(free_at) = count(*), max(free_at), null) from groups "
        "where segment is not null group by segment order by segment"
    )
    return [Shelf(name, size, None if name == active else free_at) for name, size, free_at in rows]
