"""The tables of `buffer.db`: one small row per group, the published versions, and the token counts aside.

Rows stay small because each change of state rewrites its row; the arrays lie in segment files.
"""

from __future__ import annotations

from pathlib import Path

from palestra.server.store.database import Schema

_BY_SEGMENT = "create index groups_by_segment on groups (segment) where segment is not null"
SCHEMA = Schema(
    version=2,
    statements=(
        """create table groups (
            seq integer primary key, group_id text not null unique, task_id text not null, group_size integer not null,
            state text not null, reason text, owner text, claim_id text, lease_until real, step integer,
            checkpoint_id text, versions text not null, segment text, offset integer, length integer,
            put_at real not null, ended_at real, free_at real)""",
        "create index groups_by_state on groups (state, seq)",
        _BY_SEGMENT,
        "create table counts (seq integer primary key, rollouts blob not null)",
        """create table publishes (
            version integer primary key, train_step integer not null, abandoned integer not null default 0,
            at real not null)""",
    ),
    # free_at: when no restore could need a group's arrays any more; arrays may stay for a time after that.
    upgrades={1: ("alter table groups add column free_at real", _BY_SEGMENT)},
    readable=1,
)


def buffer_path(folder: Path) -> Path:
    """The database in a run's store folder."""
    return folder / "buffer.db"


def segments_path(folder: Path) -> Path:
    """The folder of segment files in a run's store folder."""
    return folder / "segments"
