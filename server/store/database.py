"""SQLite as the store uses it: durable commits (WAL, synchronous=FULL), numbered schemas, errors of one kind.

In: a path and a schema. Out: connections for the one writer and for readers. A commit waits for the disk; a lock held
by somebody else is waited for `BUSY_S` seconds and is a `StoreError` then.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from palestra.server.types import StoreError

BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one database file and their number, kept in `pragma user_version`."""

    version: int
    statements: tuple[str, ...]
    upgrades: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Per older version the statements that make it the next one."""
    readable: int = 0
    """The oldest version whose files a reader understands; 0: the newest alone."""


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_writer(path: Path, schema: Schema) -> sqlite3.Connection:
    """A connection that may write, with the schema in place. It may be used from any one thread at a time.

    Raises:
        StoreError: the file cannot be opened, or was written by a newer version of this program.
    """
    db = None
    try:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=64)
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=full")
        with transaction(db, path):
            found = _known_version(db, path, schema)
            steps = [schema.statements] if found == 0 else [schema.upgrades[v] for v in range(found, schema.version)]
            for statement in (statement for step in steps for statement in step):
                db.execute(statement)
            if steps:
                db.execute(f"pragma user_version={schema.version}")
        sync_folder(path.parent)
    except StoreError:
        if db is not None:
            db.close()
        raise
    except (sqlite3.Error, OSError) as error:
        if db is not None:
            db.close()
        raise StoreError(f"{path}: cannot be opened: {error}") from error
    return db


def open_reader(path: Path, schema: Schema) -> sqlite3.Connection:
    """A connection that only reads, beside a live writer or on the files of a run that ended or was killed.

    Raises:
        StoreError: there is no such file, it is no database, or it was written by a newer version of this program.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no such file; is this the store folder of a run?")
    db = _connect_reader(path, "mode=ro")
    try:
        # Only now is the file read; where its folder forbids the shared memory beside it, a quiet file can be read as
        # it is.
        try:
            known = _known_version(db, path, schema)
        except sqlite3.OperationalError:
            db.close()
            wal = path.with_name(path.name + "-wal")
            if wal.exists() and wal.stat().st_size:
                raise
            db = _connect_reader(path, "immutable=1")
            known = _known_version(db, path, schema)
    except (sqlite3.Error, StoreError) as error:
        db.close()
        raise error if isinstance(error, StoreError) else StoreError(f"{path}: cannot be read: {error}") from error
    if known == 0:
        db.close()
        raise StoreError(f"{path}: an empty database; the run ended before it stored anything")
    if known < (schema.readable or schema.version):
        db.close()
        raise StoreError(
            f"{path}: written with schema {known}, an older one; going on with the run (--resume) brings it up to date"
        )
    return db


def _connect_reader(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)


def _known_version(db: sqlite3.Connection, path: Path, schema: Schema) -> int:
    found = int(db.execute("pragma user_version").fetchone()[0])
    if found > schema.version:
        raise StoreError(
            f"{path}: written with schema {found}, this palestra knows schemas up to {schema.version}; use a newer one"
        )
    return found


def check_text(*values: str | None) -> None:
    """To be called before text is given to SQLite: a binding that fails after a statement failed would, in CPython 3.11, run the
    statement with the values that it had before.

    Raises:
        StoreError: a text holds a lone surrogate, which no UTF-8 can express.
    """
    for value in values:
        try:
            (value or "").encode()
        except UnicodeEncodeError as error:
            raise StoreError(f"{value!r} cannot be stored: {error}") from error


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors while reading into StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """All or nothing, durable when the block ends without an error.

    Raises:
        StoreError: SQLite could not write (disk full, locked, damaged); nothing of the block was kept.
    """
    try:
        db.execute("begin immediate")
        yield
        db.execute("commit")
    except sqlite3.Error as error:
        undo(db)
        code = getattr(error, "sqlite_errorname", type(error).__name__)
        raise StoreError(f"{path}: {error} ({code}, {_free(path)}); nothing of this write was kept") from error
    except BaseException:
        undo(db)
        raise


def _free(path: Path) -> str:
    """For a message: SQLite calls several ways of running out of space an I/O error."""
    try:
        return f"{shutil.disk_usage(path.parent).free / 1e6:.0f} MB free"
    except OSError as error:
        return f"free space unknown: {error}"


def undo(db: sqlite3.Connection) -> None:
    """Rolls back what is open. SQLite does so itself after some errors, and then a second rollback would be one too."""
    if db.in_transaction:
        db.execute("rollback")
