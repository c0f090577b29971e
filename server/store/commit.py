"""Group commit without a timer: one thread writes whatever is queued, in one transaction, with one wait for the disk.

In: operations from one event loop. Out: a future each, done when its write is durable. While a batch is on its way to
the disk the next one gathers, so batches grow with the load. A batch that cannot be written fails every future in it
with `StoreError`, and the next batch is tried afresh. An operation that fails for a reason of its own must not have
written anything by then: only its own future hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from palestra.server.store.database import transaction
from palestra.server.types import ServerError, StoreError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item:
    operation: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]


class GroupCommit:
    """The one writer of `db`. `submit` is called on one event loop; its thread ends with `close` or the process."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path = db, path
        self._waiting: list[_Item] = []
        self._busy = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batches: SimpleQueue[list[_Item] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_batches, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Queues one write. The future gives what `operation` returned, once that is durable.

        Raises:
            StoreError: closed, or called from another event loop than the first call.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._closed or loop is not self._loop:
            raise StoreError(f"{self._path}: {'closed' if self._closed else 'in use by another event loop'}")
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append(_Item(operation, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._send)
        return future

    async def close(self) -> None:
        """Waits until all that was submitted is durable or has failed, then ends the thread and the connection."""
        if self._closed:
            return
        last = self.submit(lambda db: None)
        self._closed = True
        with contextlib.suppress(StoreError):  # a full disk: the waiters were told, and nothing is left to write
            await last
        self._batches.put(None)
        self._thread.join()

    def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        self._batches.put(batch)

    def _write_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            outcomes = self._write(batch)
            loop = batch[0].future.get_loop()
            try:
                loop.call_soon_threadsafe(self._tell, batch, outcomes)
            except RuntimeError:
                break  # the loop is gone, and with it everybody who could ask for more
        self._db.close()

    def _write(self, batch: list[_Item]) -> list[Any]:
        """What each operation gave: its result, or the error that it ended with."""
        outcomes: list[Any] = []
        try:
            with transaction(self._db, self._path):
                for item in batch:
                    outcomes.append(self._try(item))
        except StoreError as error:
            return [error] * len(batch)
        return outcomes

    def _try(self, item: _Item) -> Any:
        """One operation's result, or the error that is its own; SQLite's trouble is everybody's and goes up."""
        try:
            return item.operation(self._db)
        except ServerError as refused:
            return refused
        except sqlite3.OperationalError:
            raise
        except Exception as error:  # noqa: BLE001 - its waiter must hear of it, and the thread must live for the others
            failed = StoreError(f"{self._path}: cannot be written: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed

    def _tell(self, batch: list[_Item], outcomes: list[Any]) -> None:
        for item, outcome in zip(batch, outcomes, strict=True):
            if item.future.done():
                continue  # its waiter was cancelled; the write stands
            if isinstance(outcome, ServerError):
                item.future.set_exception(outcome)
            else:
                item.future.set_result(outcome)
        if self._waiting:
            self._send()
        else:
            self._busy = False
