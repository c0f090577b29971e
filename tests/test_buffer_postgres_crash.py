"""The PostgreSQL buffer when something dies: the connection at any statement, the service, the server, or the server's answer.

Two state machines do to the store what `tests/buffer_machine.py` does. In one the process dies; in the other the connection is lost, which
no caller may notice: each result must be that of a store that nothing happened to.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psycopg
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from palestra.server.buffer.pg_link import Db
from palestra.server.buffer.pg_reader import PostgresReader
from palestra.server.buffer.postgres import PostgresBuffer
from palestra.server.buffer.retention import Retention
from palestra.server.buffer.types import VersionRefused
from palestra.server.types import GroupState, LeaseLost, StoreError
from tests import postgres
from tests.buffer_machine import BufferMachine, Died
from tests.conformance.buffer_suite import Clock, ids
from tests.fakes.rollouts import group

pytestmark = pytest.mark.ci

KILLS = 4
_real_execute, _real_transaction = Db.execute, Db.transaction


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    yield from postgres.started()


@pytest.fixture(scope="module")
def url(server: postgres.Server) -> str:
    return server.make_database("crashes")


class FaultyStore:
    """`Store` of the machine: a run of its own for each example. Something may happen before a statement, and before and after a commit."""

    url: ClassVar[str]
    happens: ClassVar[Callable[[Db], None]]
    runs: ClassVar[int] = 0

    def __init__(self) -> None:
        self.left: int | None = None
        self.root = tempfile.TemporaryDirectory(prefix="palestra-buffer-")
        self.folder = Path(self.root.name)
        type(self).runs += 1
        self.run = f"{type(self).__name__} {type(self).runs}"
        self.buffer: PostgresBuffer | None = None
        outer = self

        def execute(db: Db, *args: Any, **kwargs: Any) -> Any:
            outer.pass_by(db)
            return _real_execute(db, *args, **kwargs)

        @contextlib.contextmanager
        def transaction(db: Db) -> Iterator[None]:
            with _real_transaction(db):
                yield
                outer.pass_by(db)
            outer.pass_by(db)

        self._patches = [mock.patch.object(Db, "execute", execute), mock.patch.object(Db, "transaction", transaction)]
        for patch in self._patches:
            patch.start()

    def pass_by(self, db: Db) -> None:
        if self.left == 0:
            self.left = None
            type(self).happens(db)
        elif self.left is not None:
            self.left -= 1

    def open(self, clock: Clock, retention: Retention) -> PostgresBuffer:
        self.buffer = PostgresBuffer(self.url, self.run, folder=self.folder, retention=retention, clock=clock)
        return self.buffer

    def arm(self, after: int) -> None:
        self.left = after

    def disarm(self) -> None:
        self.left = None

    def crash(self) -> None:
        """The connection ends as it does with its process; nothing is unlocked by hand."""
        assert self.buffer is not None
        if (db := self.buffer._link._db) is not None:
            db.close()

    def reader(self) -> PostgresReader:
        return PostgresReader(self.folder)

    def end(self) -> None:
        for patch in self._patches:
            patch.stop()
        if self.buffer is not None:
            self.buffer.close()
        self.root.cleanup()


def die(db: Db) -> None:
    db.close()
    raise Died


def lose(db: Db) -> None:
    db.close()
    raise psycopg.OperationalError("the connection is lost")


class DyingStore(FaultyStore):
    happens = die


class LossyStore(FaultyStore):
    happens = lose


class DyingMachine(BufferMachine):
    make_store = DyingStore


class LossyMachine(BufferMachine):
    make_store = LossyStore


@pytest.mark.parametrize("machine", [DyingMachine, LossyMachine])
def test_any_order_of_calls_faults_and_restores(machine: type[BufferMachine], url: str) -> None:
    FaultyStore.url = url
    run_state_machine_as_test(
        machine, settings=settings(max_examples=5, stateful_step_count=20, deadline=None, derandomize=True)
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [DyingMachine, LossyMachine])
def test_many_orders_of_calls_faults_and_restores(machine: type[BufferMachine], url: str) -> None:
    FaultyStore.url = url
    run_state_machine_as_test(
        machine, settings=settings(max_examples=250, stateful_step_count=50, deadline=None, print_blob=True)
    )


def at_commit(sent: bool) -> Any:
    """Loses the connection once, at the next commit: after it came through, or before it was sent."""
    left = [1]

    @contextlib.contextmanager
    def transaction(db: Db) -> Iterator[None]:
        with _real_transaction(db):
            yield
            if not sent and left and left.pop():
                lose(db)
        if sent and left and left.pop():
            lose(db)

    return mock.patch.object(Db, "transaction", transaction)


@pytest.mark.parametrize("sent", [True, False], ids=["came through", "was not sent"])
def test_an_answer_that_was_lost_is_given_again(url: str, tmp_path: Path, sent: bool) -> None:
    clock = Clock()
    buffer = PostgresBuffer(url, f"lost answers {sent}", folder=tmp_path, clock=clock)
    with at_commit(sent):
        assert buffer.put([group("a"), group("b"), group("c")]) == 3
    with at_commit(sent):
        assert ids(buffer.claim(2, "t", 60)) == ["a", "b"], "without a claim_id, too"
    assert ids(buffer.claim(9, "u", 60)) == ["c"]
    with at_commit(sent):
        assert buffer.release(["c"], "u") == 1
    with at_commit(sent):
        assert buffer.commit(1, "c1", ["a", "b"], "t") == 2
    with at_commit(sent):
        buffer.record_publish(0, 0)
    with pytest.raises(VersionRefused):
        buffer.record_publish(0, 0)
    with at_commit(sent):
        assert buffer.put_dropped(group("d"), "why")
    with at_commit(sent):
        report = buffer.restore(0, 0)
    assert (report.readied, report.next_version) == (("a", "b"), 1)
    with at_commit(sent):
        assert buffer.drop_older_than(9, 1) == ["a", "b", "c"]
    with at_commit(sent):
        assert sorted(buffer.collect(9)) == ["a", "b", "c"]
    buffer.close()


def test_nothing_is_written_once_another_service_has_been_there(url: str, tmp_path: Path) -> None:
    first = PostgresBuffer(url, "two services", folder=tmp_path)
    first.put([group("a")])
    assert first._link._db is not None
    first._link._db.close()
    second = PostgresBuffer(url, "two services", folder=tmp_path)
    second.drop(["a"], "why")
    second.close()
    with pytest.raises(StoreError, match="is not as this service left it"):
        first.put([group("b")])
    first.close()


def test_the_lock_of_a_killed_service_is_free(url: str, tmp_path: Path) -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from palestra.server.buffer.opening import open_buffer
        from tests.fakes.rollouts import group
        buffer = open_buffer(Path(sys.argv[1]), sys.argv[2], "killed")
        buffer.put([group("a")])
        buffer.claim(1, "t", 1000)
        print("ready", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", script, str(tmp_path), url]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(
            StoreError, match=r"in use by another service \(session \d+ from this host, palestra killed"
        ):
            PostgresBuffer(url, "killed", folder=tmp_path, opening_s=0.1)
        process.kill()
    buffer = PostgresBuffer(url, "killed", folder=tmp_path)
    assert buffer.commit(1, "c1", ["a"], "t") == 1
    buffer.close()


# The server.


def test_a_server_that_stays_away_is_an_error_that_says_what_to_do(
    server: postgres.Server, url: str, tmp_path: Path
) -> None:
    buffer = PostgresBuffer(url, "away", folder=tmp_path, opening_s=0.2, deadline_s=0.5)
    buffer.put([group("a")])
    server.kill9()
    for ask in (buffer.ready_count, lambda: buffer.put([group("b")])):
        with pytest.raises(
            StoreError, match=r"Look whether the PostgreSQL server runs.*What was acknowledged is in the database"
        ):
            ask()
    with pytest.raises(StoreError, match="Look whether the PostgreSQL server runs"):
        PostgresBuffer(url, "another", folder=tmp_path / "another", opening_s=0.2)
    server.start()
    with pytest.raises(LeaseLost):
        buffer.commit(1, "c1", ["a"], "nobody")
    assert buffer._link._lost_at is None, "the next loss has its whole time"
    assert buffer.put([group("a"), group("b")]) == 1, "the same object goes on"
    assert ids(buffer.claim(9, "t", 60)) == ["a", "b"]
    buffer.close()
    with pytest.raises(StoreError, match="this buffer is closed"):
        buffer.ready_count()


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(
    server: postgres.Server, url: str, tmp_path: Path
) -> None:
    buffer = PostgresBuffer(url, "hangs", folder=tmp_path, deadline_s=1.0)
    with server.connect("crashes") as db:
        (pid,) = db.execute("select pid from pg_stat_activity where application_name = 'palestra hangs'").fetchone()
    os.kill(pid, signal.SIGSTOP)  # the very process that serves our connection, of the server that this file started
    try:
        with pytest.raises(StoreError, match="run hangs is in use by another service"):
            buffer.put([group("a")])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert buffer.put([group("a")]) == 1
    buffer.close()


class Journal:
    """What producers and consumers were told, while the server is killed under them."""

    def __init__(self, buffer: PostgresBuffer) -> None:
        self.buffer = buffer
        self.put: list[str] = []
        self.committed: list[str] = []
        self.over = threading.Event()
        self.failed: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._guarded, args=(work, number))
            for work in (self._produce, self._consume)
            for number in range(2)
        ]

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            self.failed.append(error)
            raise

    def _produce(self, number: int) -> None:
        serial = 0
        while not self.over.is_set():
            names = [f"{number}-{serial + i}" for i in range(2)]
            assert self.buffer.put([group(name, tokens=200) for name in names]) == 2, "nobody else has put these"
            self.put += names
            serial += 2

    def _consume(self, number: int) -> None:
        step = 0
        while not (self.over.is_set() and self.buffer.ready_count() == 0):
            names = ids(self.buffer.claim(3, f"c{number}", 600))
            step += 1
            if names:
                assert self.buffer.commit(step, f"s{step}", names, f"c{number}") == len(names)
                self.committed += names


def work_while_killed(server: postgres.Server, url: str, folder: Path, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    buffer = PostgresBuffer(url, f"kills {seed}", folder=folder)
    journal = Journal(buffer)
    for thread in journal.threads:
        thread.start()
    try:
        for _ in range(kills):
            before = len(journal.committed)
            until = time.monotonic() + 30
            while len(journal.committed) < before + 10 and time.monotonic() < until and not journal.failed:
                time.sleep(0.01)
            time.sleep(rng.random() * 0.2)  # the kill comes at a random point of their work
            server.kill9()
            server.start()
    finally:
        journal.over.set()
        for thread in journal.threads:
            thread.join()
    assert not journal.failed
    assert len(journal.put) > 10 * kills
    assert sorted(journal.committed) == sorted(journal.put), "each acknowledged group was committed exactly once"
    buffer.close()
    reader = PostgresReader(folder)
    assert {entry.group_id for entry in reader.entries() if entry.state == GroupState.COMMITTED} == set(journal.put)
    assert len(reader.entries()) == len(journal.put), "what was put without an answer was put by its repetition"
    reader.close()


def test_a_server_killed_at_random_points_loses_nothing_and_doubles_nothing(
    server: postgres.Server, url: str, tmp_path: Path
) -> None:
    work_while_killed(server, url, tmp_path, random.SystemRandom().randrange(10**6), KILLS)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_a_server_killed_often(server: postgres.Server, url: str, tmp_path: Path, seed: int) -> None:
    work_while_killed(server, url, tmp_path, seed, 20)
