"""One event-loop thread per process, for whatever is asynchronous: async tools, and the model client of the agents.

Coroutines go in from episode threads, results come out; the caller waits, always with a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 5.0
"""How much longer than the coroutine's own deadline its caller waits for the loop to say so."""


class DeadlineError(TimeoutError):
    """The deadline of `call` passed; a coroutine's own TimeoutError stays what it is."""


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The running loop, started on first use in a daemon thread."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="palestra-loop").start()
        return _loop


def call(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Runs `coroutine` on the loop and waits for it; it is cancelled at its deadline.

    Raises:
        DeadlineError: it was not done after `timeout_s` seconds.
    """
    if threading.current_thread().name == "palestra-loop":
        coroutine.close()
        raise RuntimeError(
            "background.call waits for the loop's thread and was called on it; await the coroutine instead"
        )

    async def bounded() -> T:
        try:
            async with asyncio.timeout(timeout_s) as scope:
                return await coroutine
        except TimeoutError:
            if scope.expired():
                raise DeadlineError(f"not done after {timeout_s:g} s") from None
            raise

    future = asyncio.run_coroutine_threadsafe(bounded(), loop())
    done, _ = concurrent.futures.wait([future], timeout_s + GRACE_S)
    if not done:  # it does not give in to its cancellation, or blocks the loop
        future.cancel()
        raise DeadlineError(f"not done {GRACE_S:g} s after its deadline of {timeout_s:g} s")
    return future.result()


def _forget() -> None:
    """A forked child (AsyncVectorEnv) inherits the loop object but not its thread: waiting on it would hang for
    ever.
    """
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
