"""The embedded store under the state machine: every write, flush and commit is a place to die at, and power may fail with it."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from palestra.server.buffer import embedded, segments
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.buffer.retention import Retention
from tests.buffer_machine import BufferMachine, Died
from tests.conformance.buffer_suite import Clock

SEGMENT_BYTES = 1500
"""Room for about three groups."""
_real_os = segments.os
_real_open = embedded.open_writer


class Points:
    """Counts the places at which the process may die, and takes a picture of its files where it does."""

    def __init__(self) -> None:
        self.root = tempfile.TemporaryDirectory(prefix="palestra-buffer-")
        self.folder = Path(self.root.name) / "0"
        self.pictures = 0
        self.left: int | None = None
        self.unsynced: dict[str, int] = {}
        """Segments with bytes that are not on the disk yet: name -> how many are."""

    def pass_by(self) -> None:
        """One such place."""
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            self.take_picture()
            raise Died
        self.left -= 1

    def take_picture(self) -> None:
        """The folder as it is at this moment goes on as another one; bytes that no flush covered are lost with the power."""
        self.pictures += 1
        self.folder = Path(shutil.copytree(self.folder, self.folder.with_name(str(self.pictures))))
        for name, size in self.unsynced.items():
            path = self.folder / "segments" / name
            if path.exists():
                _real_os.truncate(path, size)
        for path in sorted((self.folder / "segments").glob("*.seg"))[-1:]:
            path.write_bytes(path.read_bytes() + b"PLG\x01 torn")


class FaultyOs:
    """`os` as the segments see it, with a place to die before and after everything that changes a file."""

    CHANGES = frozenset({"open", "ftruncate", "unlink", "fdatasync", "pwritev"})

    def __init__(self, points: Points) -> None:
        self._points, self._names = points, dict[int, str]()

    def __getattr__(self, name: str) -> Any:
        real = getattr(_real_os, name)
        if name not in self.CHANGES:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self._points.pass_by()
            if name == "pwritev":
                fd, views, where = args
                self._points.unsynced.setdefault(self._names.get(fd, ""), _real_os.fstat(fd).st_size)
                _real_os.pwrite(fd, views[0][: len(views[0]) // 2], where)
                self._points.pass_by()
            result = real(*args, **kwargs)
            if name == "open" and str(args[0]).endswith(segments.SUFFIX):
                self._names[result] = Path(args[0]).name
            if name == "fdatasync":
                self._points.unsynced.pop(self._names.get(args[0], ""), None)
            self._points.pass_by()
            return result

        return call


class FaultyDatabase:
    """A connection, with a place to die before every statement and after a commit."""

    def __init__(self, db: sqlite3.Connection, points: Points) -> None:
        self._db, self._points = db, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        self._points.pass_by()
        cursor = self._db.execute(sql, values)
        if sql == "commit":
            self._points.pass_by()
        return cursor

    def executemany(self, sql: str, values: Any) -> sqlite3.Cursor:
        self._points.pass_by()
        return self._db.executemany(sql, values)


class EmbeddedStore:
    """`Store` in a folder of its own."""

    def __init__(self) -> None:
        self.points = Points()
        self._patches = [
            mock.patch.object(segments, "os", FaultyOs(self.points)),
            mock.patch.object(embedded, "open_writer", self._open_writer),
        ]
        for patch in self._patches:
            patch.start()
        self._buffer: EmbeddedBuffer | None = None

    def _open_writer(self, *args: Any) -> Any:
        return FaultyDatabase(_real_open(*args), self.points)

    def open(self, clock: Clock, retention: Retention) -> EmbeddedBuffer:
        self._close()
        self.points.unsynced.clear()
        self._buffer = EmbeddedBuffer(self.points.folder, segment_bytes=SEGMENT_BYTES, retention=retention, clock=clock)
        return self._buffer

    def arm(self, after: int) -> None:
        self.points.left = after

    def disarm(self) -> None:
        self.points.left = None

    def crash(self) -> None:
        """Where nobody died at a place, between two calls, the picture is taken now."""
        assert self._buffer is not None
        if self._buffer.path.parent == self.points.folder:
            self.points.take_picture()

    def reader(self) -> BufferReader:
        return BufferReader(self.points.folder)

    def end(self) -> None:
        self._close()
        for patch in self._patches:
            patch.stop()
        self.points.root.cleanup()

    def _close(self) -> None:
        """Of the dead process: it holds files of a folder that nobody looks at any more."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class EmbeddedMachine(BufferMachine):
    make_store = EmbeddedStore


@pytest.mark.timeout(600)  # a failing case takes its time to be made small
def test_any_order_of_calls_deaths_and_restores() -> None:
    run_state_machine_as_test(
        EmbeddedMachine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)
    )


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_orders_of_calls_deaths_and_restores() -> None:
    run_state_machine_as_test(
        EmbeddedMachine, settings=settings(max_examples=600, stateful_step_count=50, deadline=None, print_blob=True)
    )
