"""The PostgreSQL buffer, on a real server: the suite of every buffer, its schema, its URL, and what it says when it cannot go on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.server.buffer import pg_schema
from palestra.server.buffer.opening import has_buffer, open_buffer, open_buffer_reader
from palestra.server.buffer.pg_place import note_place, read_place
from palestra.server.buffer.pg_reader import PostgresReader
from palestra.server.buffer.postgres import PostgresBuffer
from palestra.server.buffer.retention import Retention
from palestra.server.store.database import Schema
from palestra.server.types import StoreError
from tests import postgres
from tests.conformance.buffer_suite import Clock, ids
from tests.conformance.run_buffer_suite import RunBufferSuite, StoreUnderTest
from tests.fakes.rollouts import group

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    yield from postgres.started()


@pytest.fixture(scope="module")
def url(server: postgres.Server) -> str:
    """A database that all tests of this file share, each under a run of its own."""
    return server.make_database("runs")


class PostgresStore:
    """A run of its own in the shared database."""

    def __init__(self, server: postgres.Server, url: str, folder: Path, clock: Clock) -> None:
        self.server, self.url, self.folder, self.clock = server, url, folder, clock

    def open(self, retention: Retention = Retention()) -> PostgresBuffer:  # noqa: B008 (frozen)
        return PostgresBuffer(
            self.url, self.folder.name, folder=self.folder, retention=retention, clock=self.clock, opening_s=0.5
        )

    def reader(self) -> PostgresReader:
        return PostgresReader(self.folder)

    def damage(self, group_id: str) -> None:
        place = read_place(self.folder)
        assert place is not None
        with self.server.connect("runs") as db:
            db.execute(f"set search_path to {place.schema}")
            db.execute(
                "update arrays set data = set_byte(data, 30, get_byte(data, 30) # 1) "
                "where seq = (select seq from groups where group_id = %s)",
                (group_id,),
            )


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A store folder whose name is that of the test."""
    return tmp_path / request.node.name


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(server: postgres.Server, url: str, folder: Path, clock: Clock) -> PostgresStore:
    return PostgresStore(server, url, folder, clock)


class TestPostgresBuffer(RunBufferSuite):
    @pytest.fixture
    def store(self, server: postgres.Server, url: str, folder: Path, clock: Clock) -> StoreUnderTest:
        return PostgresStore(server, url, folder, clock)


# The schema.


def test_runs_share_a_database_and_not_their_groups(server: postgres.Server, url: str, tmp_path: Path) -> None:
    one, two = (PostgresBuffer(url, name, folder=tmp_path / name) for name in ("same-name", "same name"))
    assert one.place.schema != two.place.schema
    one.put([group("a")])
    two.put([group("a"), group("b")])
    assert ids(one.claim(9, "t", 60)) == ["a"]
    assert ids(two.claim(9, "t", 60)) == ["a", "b"]
    one.close()
    two.close()


def test_a_run_of_another_folder_is_not_written(url: str, tmp_path: Path) -> None:
    first = PostgresBuffer(url, "taken", folder=tmp_path / "one")
    first.close()
    with pytest.raises(StoreError, match=r'has a run taken already, of another folder.*drop schema "palestra_taken_'):
        PostgresBuffer(url, "taken", folder=tmp_path / "two")


def test_a_newer_schema_is_refused(store: PostgresStore, server: postgres.Server) -> None:
    store.open().close()
    with server.connect("runs") as db:
        place = read_place(store.folder)
        assert place is not None
        db.execute(f"update {place.schema}.store set version = 99")
    for open_it in (store.open, store.reader):
        with pytest.raises(
            StoreError, match="written with schema 99, this palestra knows schemas up to 1; use a newer one"
        ):
            open_it()


def test_an_older_schema_is_brought_up_to_date_in_one_transaction(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.open()
    before.put([group("a")])
    before.close()
    later = Schema(3, (), {1: ("alter table groups add note text",), 2: ("update groups set note = 'x' / 0",)})
    monkeypatch.setattr(pg_schema.own, "__defaults__", (later,))
    with pytest.raises(StoreError, match="cannot be opened"):
        store.open()
    monkeypatch.setattr(pg_schema.look, "__defaults__", (later,))
    with pytest.raises(StoreError, match="written with schema 1, an older one; going on with the run"):
        store.reader()
    mended = Schema(3, (), {**later.upgrades, 2: ("update groups set note = 'x'",)})
    monkeypatch.setattr(pg_schema.own, "__defaults__", (mended,))
    after = store.open()
    assert ids(after.claim(9, "t", 60)) == ["a"], "nothing of the failed upgrade was kept, or it would fail here"
    after.close()
    reader = store.reader()
    assert [entry.state for entry in reader.entries()] == ["claimed"]
    reader.close()


def test_arrays_lie_outside_the_rows_and_a_claim_touches_no_index(
    store: PostgresStore, server: postgres.Server
) -> None:
    buffer = store.open()
    buffer.put([group(f"g{i}", tokens=2000) for i in range(8)])
    buffer.claim(8, "t", 60)
    buffer.close()
    with server.connect("runs") as db:
        db.execute(f"set search_path to {buffer.place.schema}")
        assert db.execute("select max(pg_column_size(g)) < 300 from groups g").fetchone() == (True,)
        kinds = dict(
            db.execute(
                "select attname, attstorage::text from pg_attribute where attrelid = 'arrays'::regclass"
            ).fetchall()
        )
        assert kinds["data"] == "e", "external: never compressed"
        db.execute("select pg_stat_force_next_flush()")
        changed = db.execute(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'groups'::regclass"
        ).fetchone()
        assert changed == (8, 8)


def test_what_the_database_refuses_changes_nothing(store: PostgresStore) -> None:
    buffer = store.open()
    with pytest.raises(StoreError, match=r"NUL.*nothing of this was kept"):
        buffer.put([group("a"), group("no\0text")])
    assert buffer.put([group("a")]) == 1
    buffer.close()


# Where it lies, and what is said of it.


def test_readers_find_the_database_by_the_folder(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert not has_buffer(folder)
    buffer = open_buffer(folder, url, "found")
    buffer.put([group("a")])
    reader = open_buffer_reader(folder)
    assert isinstance(reader, PostgresReader)
    assert [entry.group_id for entry in reader.entries()] == ["a"]
    reader.close()
    buffer.close()
    noted = json.loads((folder / "buffer.json").read_text())
    assert (noted["run"], noted["url"]) == ("found", url)
    assert has_buffer(folder)
    with pytest.raises(StoreError, match="this run's groups lie in postgresql://"):
        open_buffer(folder, None, "found")
    with pytest.raises(StoreError, match="this run is called found in the database, not other"):
        open_buffer(folder, url, "other")


def test_a_reader_of_a_run_that_was_dropped_says_so(url: str, tmp_path: Path) -> None:
    note_place(tmp_path, url, "never begun")
    with pytest.raises(StoreError, match="no run never begun"):
        open_buffer_reader(tmp_path)


def test_no_password_in_errors_logs_or_files(
    server: postgres.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    for secret, message in (("wrong-but-secret", "password authentication failed"), ("", "no password supplied")):
        bare = server.url("runs", postgres.LOCKED)
        with pytest.raises(StoreError, match=message) as caught:
            PostgresBuffer(bare.replace("@", f":{secret}@") if secret else bare, "locked", folder=tmp_path)
        said = "".join(traceback.format_exception(caught.value)) + caplog.text + (tmp_path / "buffer.json").read_text()
        assert "PGPASSFILE has its password" in said
        assert not secret or secret not in said
        assert caught.value.__context__ is None, "the driver's own error holds the password"


def test_a_role_that_may_not_make_a_schema_is_told_at_once(server: postgres.Server, tmp_path: Path) -> None:
    url = server.url("postgres", postgres.LOCKED).replace("@", f":{postgres.PASSWORD}@")
    with pytest.raises(StoreError, match="permission denied for database") as caught:
        PostgresBuffer(url, "r", folder=tmp_path)
    assert postgres.PASSWORD not in str(caught.value)
    assert postgres.PASSWORD not in (tmp_path / "buffer.json").read_text()


def test_the_service_needs_the_driver_only_for_a_url(tmp_path: Path) -> None:
    script = """if True:
        import sys
        sys.modules["psycopg"] = None
        from pathlib import Path
        from palestra.server.buffer.opening import open_buffer
        open_buffer(Path(sys.argv[1]) / "a", None, "r").close()
        open_buffer(Path(sys.argv[1]) / "b", "postgresql://nobody@127.0.0.1:1/x", "r")
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "pip install 'palestra[postgres]'" in done.stderr.splitlines()[-1]
    assert (tmp_path / "a" / "buffer.db").exists()
