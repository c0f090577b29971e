"""The tables of `turns.db`. Sessions are few and change; turns are many and only ever appended, in the order in which
they came.

A turn names its session by the session's row, so that the one index on turns is two small integers: a text key there
would double the bytes and the time of an append.
"""

from __future__ import annotations

from pathlib import Path

from palestra.server.store.database import Schema

TURNS_DB = "turns.db"

SCHEMA = Schema(
    version=2,
    statements=(
        """create table groups (
            id integer primary key, group_id text not null unique, task blob not null, seed integer not null,
            size integer not null, attempt integer not null, state text not null)""",
        """create table sessions (
            id integer primary key, rollout_id text not null, attempt integer not null, group_id text not null,
            task_id text not null, idx integer not null, state text not null, opened_at real not null, ended_at real,
            discard_reason text, reward real, stop_reason text, truncated integer, meta blob not null, outcome blob,
            unique (rollout_id, attempt))""",
        "create index sessions_by_group on sessions (group_id)",
        """create table turns (
            id integer primary key, session integer not null, idx integer not null, parent integer,
            tokens integer not null, delivered integer not null, close_tokens integer not null,
            cached_tokens integer not null, temperature real not null, finish_reason text not null, fork_reason text,
            at real not null, prompt blob not null, completion blob not null, logprobs blob not null,
            spans blob not null, messages blob not null, experts_shape text, experts blob, extra blob)""",
        "create unique index turns_of_session on turns (session, idx)",
        """create table events (
            id integer primary key, session integer not null, kind text not null, at real not null,
            data blob not null)""",
        "create index events_of_session on events (session)",
    ),
    upgrades={1: ("alter table turns add column extra blob",)},
)


def turns_path(folder: Path) -> Path:
    """The log's file in a run's store folder."""
    return folder / TURNS_DB
