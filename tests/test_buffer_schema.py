"""Files of other versions of the buffer: an older one is brought up to date or read as it is, a newer one is refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from palestra.server.buffer import schema
from palestra.server.buffer.counts import count_rollouts, counts_to_json
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.store.database import Schema
from palestra.server.types import GroupState, StoreError
from palestra.server.wire.codec import encode_group
from tests.conformance.buffer_suite import Clock, ids
from tests.fakes.rollouts import group

VERSION_1 = """
    create table groups (
        seq integer primary key, group_id text not null unique, task_id text not null, group_size integer not null,
        state text not null, reason text, owner text, claim_id text, lease_until real, step integer,
        checkpoint_id text, versions text not null, segment text, offset integer, length integer,
        put_at real not null, ended_at real);
    create index groups_by_state on groups (state, seq);
    create table counts (seq integer primary key, rollouts blob not null);
    create table publishes (
        version integer primary key, train_step integer not null, abandoned integer not null default 0,
        at real not null);
    pragma user_version=1;
"""
"""Word for word what version 1 made."""
STATES = {"a": ("committed", None, 1), "b": ("dropped", "stale", None), "c": ("ready", None, None)}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store folder as version 1 left it: one segment, a group of each of three states, two publishes."""
    blobs = {name: encode_group(group(name)) for name in STATES}
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "00000001.seg").write_bytes(b"".join(blobs.values()))
    db = sqlite3.connect(tmp_path / "buffer.db", isolation_level=None)
    db.execute("pragma journal_mode=wal")
    db.executescript(VERSION_1)
    offset = 0
    for seq, (name, (state, reason, step)) in enumerate(STATES.items(), 1):
        place = ("00000001.seg", offset, len(blobs[name]))
        db.execute(
            "insert into groups (seq, group_id, task_id, group_size, state, reason, step, owner, versions, segment, offset, "
            "length, put_at) values (?, ?, 'task', 2, ?, ?, ?, 't', '[0]', ?, ?, ?, 1000.0)",
            (seq, name, state, reason, step, *place),
        )
        db.execute("insert into counts values (?, ?)", (seq, counts_to_json(count_rollouts(group(name)))))
        offset += len(blobs[name])
    db.executemany("insert into publishes values (?, ?, 0, 1.0)", [(0, 0), (1, 1)])
    db.close()
    return tmp_path


def version_of(folder: Path) -> int:
    db = sqlite3.connect(folder / "buffer.db")
    try:
        return int(db.execute("pragma user_version").fetchone()[0])
    finally:
        db.close()


def test_a_reader_takes_an_older_file_as_it_is(old: Path) -> None:
    reader = BufferReader(old)
    found = {entry.group_id: entry for entry in reader.entries()}
    assert [found[name].state for name in "abc"] == [GroupState.COMMITTED, GroupState.DROPPED, GroupState.READY]
    assert {entry.free_at for entry in found.values()} == {None}
    assert found["c"].stored_bytes == len(encode_group(group("c")))
    assert reader.read_group("b").group_id == "b"
    assert reader.publishes() == ((0, 0, False), (1, 1, False))
    reader.close()
    assert version_of(old) == 1


def test_a_writer_brings_it_up_to_date_and_goes_on(old: Path) -> None:
    buffer = EmbeddedBuffer(old, clock=Clock())
    assert version_of(old) == schema.SCHEMA.version
    assert buffer.put([group("c"), group("d")]) == 1
    assert buffer.restore(0, 0).readied == ("a",)
    assert ids(buffer.claim(9, "t", 60)) == ["a", "c", "d"]
    assert buffer.commit(1, "c1", ["a", "c"], "t") == 2
    assert buffer.collect(1) == ["00000001.seg"]
    reader = BufferReader(old)
    assert [entry.free_at is not None for entry in reader.entries()] == [True, True, True, False]
    reader.close()
    buffer.close()


def test_an_upgraded_file_has_the_tables_of_a_new_one(old: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    new = tmp_path_factory.mktemp("new")
    for folder in (old, new):
        EmbeddedBuffer(folder).close()
    shapes = []
    for folder in (old, new):
        db = sqlite3.connect(folder / "buffer.db")
        columns = db.execute("select name, type, \"notnull\" from pragma_table_info('groups')").fetchall()
        names = db.execute("select name from sqlite_master order by name").fetchall()
        shapes.append((columns, names))
        db.close()
    assert shapes[0] == shapes[1]


def test_an_upgrade_that_fails_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (*schema.SCHEMA.upgrades[1], "alter table nothing add column x")
    broken = Schema(2, schema.SCHEMA.statements, {1: steps}, readable=1)
    monkeypatch.setattr("palestra.server.buffer.embedded.SCHEMA", broken)
    with pytest.raises(StoreError, match="nothing of this write was kept"):
        EmbeddedBuffer(old)
    assert version_of(old) == 1
    monkeypatch.undo()
    buffer = EmbeddedBuffer(old)
    assert buffer.ready_count() == 1
    buffer.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    EmbeddedBuffer(tmp_path).close()
    db = sqlite3.connect(tmp_path / "buffer.db")
    db.execute("pragma user_version=99")
    db.close()
    for open_it in (EmbeddedBuffer, BufferReader):
        with pytest.raises(StoreError, match=r"buffer.db: written with schema 99"):
            open_it(tmp_path)
