"""One connection to PostgreSQL that is made again when it is lost.

In: a URL, how a new connection is prepared, and what is to be done on it. Out: its result, or a StoreError that says what to do. Waits for
the server: `opening_s` at first, `deadline_s` once it was there, and as long for each single answer. One caller at a time; the others wait
for it. No password is ever part of an error or a log line.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus

from palestra.server.types import ServerError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
RV = TypeVar("RV")
CONNECT_S = 5
FIRST_DELAY_S, LONGEST_DELAY_S = 0.02, 1.0
LOCK_WAIT_S = 10
_PASSING = ("starting up", "shutting down", "recovery", "too many", "connection slots", "read-only", "standby")
"""In the words of a server that refuses a connection: it may accept the next one."""
_SETTINGS = """
    select set_config('statement_timeout', %(wait_ms)s, false), set_config('lock_timeout', %(lock_ms)s, false),
        set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
        set_config('tcp_keepalives_count', '3', false),
        set_config('synchronous_commit',
            case current_setting('synchronous_commit') when 'off' then 'on' else current_setting('synchronous_commit') end, false)"""
"""A server that lost us lets go within half a minute; an acknowledged commit is on its disk."""


class Occupied(StoreError):
    """Somebody else holds what a new connection needs. It may be a session of ours that the server has not missed yet."""


class Db(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose every wait ends: one that hangs is closed, since nobody knows how far it got."""

    answer_s: float = 60.0

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """As in psycopg, for `answer_s` seconds at most."""
        limit = self.answer_s if timeout is None else timeout
        started = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError:
            active = self.pgconn.transaction_status == TransactionStatus.ACTIVE
            if active and time.monotonic() - started >= limit:
                self.close()
            raise


class Link:
    """The connection of one buffer or reader. Thread-safe."""

    def __init__(
        self, url: str, shown: str, prepare: Callable[[Db], None], *, name: str, opening_s: float, deadline_s: float
    ) -> None:
        """Connects. `prepare` is called with each new connection, outside a transaction; `shown` is the URL without a password, `name` is
        what the server's own views call us.

        Raises:
            StoreError: the server does not answer or refuses us, or what `prepare` raised.
        """
        self._url, self.shown, self._prepare = url, shown, prepare
        self._name, self._deadline_s = name, deadline_s
        self._mutex = threading.RLock()
        self._closing = threading.Event()
        self._db: Db | None = None
        self._lost_at: float | None = None
        """When the connection was lost, until something came through again."""
        with self._mutex:
            self._reach(time.monotonic() + opening_s, first=True)

    def call(self, attempt: Callable[[Db], T]) -> T:
        """What `attempt` gives. It is called again after a connection was lost under it, on a new one; so it has to find out what an
        earlier call of it did.

        Raises:
            StoreError: the server did not come back in time, or refused what was asked.
        """
        with self._mutex:
            delay = FIRST_DELAY_S
            while True:
                db = self._db if self._db is not None else self._reach(self._until())
                try:
                    result = attempt(db)
                except psycopg.Error as error:
                    reason = _words(error)
                    if not _is_lost(db, error):
                        self._lost_at = None
                        raise StoreError(f"{self.shown}: {reason}; nothing of this was kept") from error
                    if time.monotonic() > self._until():
                        raise StoreError(self._gave_up(reason)) from error
                    log.warning("%s: %s; connecting again", self.shown, reason)
                except UnicodeEncodeError as error:
                    raise StoreError(f"{error.object!r} cannot be stored: {error.reason}") from error
                except ServerError:  # the server answered; what it said does not suit us
                    self._lost_at = None
                    raise
                else:
                    self._lost_at = None
                    return result
                self._let_go()
                self._closing.wait(delay)
                delay = min(delay * 2, LONGEST_DELAY_S)

    def _until(self) -> float:
        """When to give up, counted from the first loss: whoever asks later, while the server is still away, tries once and does not wait
        anew."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        return self._lost_at + self._deadline_s

    def close(self) -> None:
        """Ends the connection, and the waiting of whoever waits for a new one."""
        self._closing.set()
        with self._mutex:
            if self._db is not None:
                # The server frees locks when it finds the connection closed; said aloud, they are free at once.
                with contextlib.suppress(psycopg.Error):
                    self._db.execute("select pg_advisory_unlock_all()")
            self._let_go()

    def _reach(self, until: float, *, first: bool = False) -> Db:
        delay = FIRST_DELAY_S
        while True:
            if self._closing.is_set():
                raise StoreError(f"{self.shown}: this buffer is closed")
            reason, is_final = self._try()
            if self._db is not None:
                return self._db
            if (first and is_final) or time.monotonic() + delay > until:
                raise StoreError(self._gave_up(reason))
            self._closing.wait(delay)
            delay = min(delay * 2, LONGEST_DELAY_S)

    def _try(self) -> tuple[str, bool]:
        """Connects; gives why it could not, and whether trying again is of no use. The driver's own error is left behind here: it holds the
        password."""
        db = None
        try:
            db = self._connect()
            waits = {"wait_ms": str(max(int(self._deadline_s * 1000), 1)), "lock_ms": str(LOCK_WAIT_S * 1000)}
            db.execute(_SETTINGS, waits)
            self._prepare(db)
        except Occupied as error:
            reason, is_final = str(error), False
        except psycopg.Error as error:
            if db is not None and not _is_lost(db, error):
                db.close()
                raise StoreError(f"{self.shown}: cannot be opened: {_words(error)}") from error
            reason = _words(error)
            is_final = "FATAL" in reason and not any(word in reason for word in _PASSING)
            is_final = is_final or "no password supplied" in reason
        except BaseException:
            if db is not None:
                db.close()
            raise
        else:
            self._db = db
            return "", False
        if db is not None:
            db.close()
        return reason, is_final

    def _connect(self) -> Db:
        db = Db.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name=self._name,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=int(self._deadline_s * 1000),
        )
        db.answer_s = self._deadline_s
        return db

    def _let_go(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _gave_up(self, reason: str) -> str:
        return (
            f"{self.shown}: {reason}. Look whether the PostgreSQL server runs and can be reached from here, whether buffer.url is right "
            "and PGPASSFILE has its password; then go on with --resume. What was acknowledged is in the database"
        )


def _is_lost(db: Db, error: psycopg.Error) -> bool:
    """Whether the connection is of no use any more, so that the same may be tried on another one."""
    code = error.sqlstate or ""
    return db.closed or db.broken or code.startswith("08") or code == "25006"  # the server has become a standby


def _words(error: psycopg.Error) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
