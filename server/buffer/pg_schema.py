"""The tables of one run in PostgreSQL, and how a connection becomes that of the run's one service or of a reader.

Each run has a schema of its own: it is brought up to date by the service that runs it, while others go on with older builds; it is vacuumed
and dropped by itself; and no index carries the run's name. In: a new connection. Out: the same with the schema in place as its search
path. Waits for nobody: what somebody else holds is `Occupied`.

Metadata rows stay small, since each change of state writes its row anew; arrays lie in a table of their own that no change of state
touches, as they are (`storage external`: packed logprobs do not compress). The partial index holds what a claim looks through; its
condition is not the state itself, so that claiming and releasing are heap-only updates that touch no index.
"""

from __future__ import annotations

from psycopg import sql

from palestra.server.buffer.pg_link import Db, Occupied
from palestra.server.buffer.pg_place import Place
from palestra.server.store.database import Schema
from palestra.server.types import StoreError

SCHEMA = Schema(
    version=1,
    statements=(
        "create table store (run text not null, id text not null, version int not null)",
        "create table last_call (token bigint not null) with (fillfactor = 20)",
        "insert into last_call values (0)",
        """create table groups (
            seq bigint generated always as identity primary key, group_id text not null unique, task_id text not null,
            group_size int not null, state text not null, reason text, owner text, claim_id text,
            lease_until double precision, step bigint, checkpoint_id text, versions bigint[] not null,
            put_at double precision not null, ended_at double precision, free_at double precision,
            check ((state in ('ready', 'claimed')) = (ended_at is null)), check ((state = 'claimed') = (lease_until is not null))
        ) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02)""",
        "create index groups_waiting on groups (seq) where ended_at is null",
        "create index groups_by_step on groups (step) where step is not null",
        "create index groups_by_reason on groups (reason, seq) where reason is not null",
        "create table arrays (seq bigint primary key, data bytea not null)",
        "alter table arrays alter column data set storage external",
        "create table counts (seq bigint primary key, rollouts bytea not null)",
        """create table publishes (
            version bigint primary key, train_step bigint not null, abandoned boolean not null default false,
            at double precision not null)""",
    ),
)
_HOLDER = """
    select a.pid, coalesce(host(a.client_addr), 'this host'), a.application_name, a.backend_start::text
    from pg_locks l join pg_stat_activity a using (pid)
    where l.locktype = 'advisory' and l.granted and l.database = (select oid from pg_database where datname = current_database())
        and l.classid::bigint = ((%(key)s::bigint >> 32) & 4294967295) and l.objid::bigint = (%(key)s::bigint & 4294967295)"""


def own(db: Db, place: Place, schema: Schema = SCHEMA) -> None:
    """Makes this connection the run's one writer: takes its lock, which the server frees when the connection or our process ends, and makes
    its tables or brings them up to date.

    Raises:
        Occupied: another connection holds the lock.
        StoreError: the tables are of a newer build, or of the run of another folder.
    """
    if not _one(db, "select pg_try_advisory_lock(%s)", place.lock):
        holder = db.execute(_HOLDER, {"key": place.lock}).fetchone()
        who = f" (session {holder[0]} from {holder[1]}, {holder[2]}, since {holder[3]})" if holder else ""
        raise Occupied(f"run {place.run} is in use by another service{who}; one service owns a run's buffer")
    with db.transaction():
        if not _exists(db, place):
            db.execute(sql.SQL("create schema {}").format(sql.Identifier(place.schema)))
        db.execute(sql.SQL("set search_path to {}").format(sql.Identifier(place.schema)))
        found = _version(db, place, schema)
        steps = [schema.statements] if found == 0 else [schema.upgrades[v] for v in range(found, schema.version)]
        for statement in (statement for step in steps for statement in step):
            db.execute(statement.encode())
        if found == 0:
            db.execute("insert into store values (%s, %s, %s)", (place.run, place.id, schema.version))
        elif steps:
            db.execute("update store set version = %s", (schema.version,))


def look(db: Db, place: Place, schema: Schema = SCHEMA) -> None:
    """Makes this connection a reader of the run, beside its service or after it.

    Raises:
        StoreError: the run is not there, or its tables are of another build that this one cannot read.
    """
    db.execute("set default_transaction_read_only = on")
    if not _exists(db, place):
        raise StoreError(f"{place.url}: no run {place.run}; the run ended before it stored anything, or it was dropped")
    db.execute(sql.SQL("set search_path to {}").format(sql.Identifier(place.schema)))
    found = _version(db, place, schema)
    if found < (schema.readable or schema.version):
        raise StoreError(
            f"{place.url}: run {place.run} was written with schema {found}, an older one; "
            "going on with the run (--resume) brings it up to date"
        )


def _version(db: Db, place: Place, schema: Schema) -> int:
    """The number of the tables that are there; 0 where there are none."""
    if not _one(db, "select to_regclass('store') is not null"):
        return 0
    row = db.execute("select id, version from store").fetchone()
    if row is None:
        raise StoreError(f"{place.url}: schema {place.schema} is not as palestra left it: its table store is empty")
    if row[0] != place.id:
        raise StoreError(
            f"{place.url}: the database has a run {place.run} already, of another folder; give this run another name, "
            f'or remove the other one: drop schema "{place.schema}" cascade'
        )
    if row[1] > schema.version:
        raise StoreError(
            f"{place.url}: run {place.run} was written with schema {row[1]}, this palestra knows schemas up to {schema.version}; "
            "use a newer one"
        )
    return int(row[1])


def _exists(db: Db, place: Place) -> bool:
    return _one(db, "select exists (select from pg_namespace where nspname = %s)", place.schema)


def _one(db: Db, query: str, *values: object) -> bool:
    row = db.execute(query.encode(), values).fetchone()
    return row is not None and bool(row[0])
