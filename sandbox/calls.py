"""The check of functions: the test runs out here, the functions in the box, and only Python literals cross.

In: a trusted test that calls. Out: a grade. So nothing that a model writes can see the test, say that it passed, or come back as an object
with an `__eq__` of its own. Waits for the box, and for the test, which has a thread of its own since it calls as plain functions do.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import concurrent.futures
import functools
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.sandbox.checks import fault_of
from palestra.sandbox.grading import Grade
from palestra.sandbox.types import Box, ExecResult, SandboxError, Session

MOST_LINE = 256 * 1024
"""Most bytes of one call's arguments, and of its answer."""
LOAD_S = 5.0
"""Seconds that a session may take to begin, beside the check's own time."""

Judge = Callable[["Candidate"], object]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls functions of a Python file of the work."""

    path: str
    """The file, such as "solution.py". It is loaded once; what it keeps between calls stays."""
    judge: Judge
    """The test: `judge(call)`, with `call(name, *args, **kwargs)`. It fails by raising, or by returning False. Arguments and answers are
    literals (numbers, strings, bytes, None, booleans, and tuples, lists, dicts and sets of those). Where the function raised, `call`
    raises the built-in exception of that name, RuntimeError for others."""

    async def run(self, box: Box, timeout: float) -> Grade:
        end = time.monotonic() + timeout
        session = await box.open_session("python")
        candidate = Candidate(session, end, asyncio.get_running_loop())
        if wrong := await candidate.load(self.path):
            return Grade(False, wrong, result=candidate.result)
        outcome = await _judged(self.judge, candidate, end)
        if candidate.fault:
            raise SandboxError(candidate.fault)
        if candidate.misuse:
            raise ValueError(candidate.misuse)
        reason = candidate.over or outcome
        return Grade(not reason, reason or "the test passed", candidate.answered, result=candidate.result)


class Over(BaseException):
    """There will be no more answers. No test catches it by `except Exception`."""


class Candidate:
    """What the test calls, from its thread."""

    def __init__(self, session: Session, end: float, loop: asyncio.AbstractEventLoop) -> None:
        self._session, self._end, self._loop = session, end, loop
        self._asked: concurrent.futures.Future[ExecResult] | None = None
        self.answered = 0
        self.over = ""
        """Why the work has failed, whatever the test makes of it."""
        self.fault = ""
        """Why there is no verdict: our doing."""
        self.misuse = ""
        """What the test did wrong."""
        self.result: ExecResult | None = None

    async def load(self, path: str) -> str:
        """Imports the work in the session; why it could not be, else "".

        Raises:
            SandboxError: the session could not begin.
        """
        fault_of(begun := await self._session.run(driver_text(), timeout=LOAD_S))
        if begun.status != "ok":
            raise SandboxError(f"the driver could not begin: {begun.status} {begun.text[-200:]}")
        self.result = await self._session.run(f"_palestra_load({path!r})", timeout=self._left())
        fault_of(self.result)
        if self.result.status == "ok":
            return ""
        return f"{path} could not be loaded: {self.result.message or self.result.text[-400:]}".strip()

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the work.

        Raises:
            Exception: the function raised; a built-in one of the same name, or RuntimeError.
            Over: the work has failed, or the box is lost; the check is over.
        """
        if not self.over and time.monotonic() >= self._end:
            self.over = "no time was left"
        if self.over or self.fault:
            raise Over(self.over or self.fault)
        line = self._line((name, args, kwargs))
        token = secrets.token_hex(8)
        code = f"_palestra_call({token!r}, {line!r}, {MOST_LINE})"
        self._asked = asyncio.run_coroutine_threadsafe(
            self._session.run(code, timeout=self._left(), max_output=MOST_LINE + 4096), self._loop
        )
        try:
            self.result = self._asked.result()
            fault_of(self.result)
        except SandboxError as error:
            self.fault = str(error)
            raise Over(self.fault) from error
        except concurrent.futures.CancelledError as error:
            raise Over(self.over) from error
        return self._answer(name, token, self.result)

    def abandon(self, reason: str) -> None:
        """Nobody waits for the verdict any more: the test's thread must not either."""
        self.over = self.over or reason
        if self._asked is not None:
            self._asked.cancel()

    def _left(self) -> float:
        return max(0.05, self._end - time.monotonic())

    def _line(self, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> str:
        line = f"arguments of {call[0]}"
        try:
            line = repr(call)
            plain = len(line) <= MOST_LINE and ast.literal_eval(line) == call
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            plain = False
        if not plain:
            self.misuse = f"the test calls {call[0]} with what is no literal of at most {MOST_LINE} bytes: {line[:200]}"
            raise Over(self.misuse)
        return line

    def _answer(self, name: str, token: str, result: ExecResult) -> Any:
        lines = [line for line in result.stdout.split(b"\n") if line.startswith(token.encode())]
        if result.status != "ok" or not lines:
            self._end_with(f"{name}: {result.message or result.status}")
        try:
            kind, value = ast.literal_eval(lines[-1][len(token) :].decode().strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            self._end_with(f"{name}: answered with what is no literal")
        self.answered += 1
        if kind == "raise":
            raise _exception(str(value))
        if kind != "ok":
            self._end_with(f"{name}: answered with {str(kind)[:40]}")
        return value

    def _end_with(self, reason: str) -> None:
        self.over = reason
        raise Over(reason)


def _exception(name: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration | UnicodeError):
        made = kind(f"{name} in the box")
        if isinstance(made, Exception):
            return made
    return RuntimeError(f"{name[:80]} in the box")


async def _judged(judge: Judge, candidate: Candidate, end: float) -> str:
    """Runs the test in a thread; why it failed, else ""."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[str] = loop.create_future()

    def tell(reason: str) -> None:
        if not outcome.done():
            outcome.set_result(reason)

    def run() -> None:
        try:
            reason = "the test returned False" if judge(candidate) is False else ""
        except (Exception, Over) as error:  # noqa: BLE001 - whatever a test raises is its verdict
            reason = f"{type(error).__name__}: {error}"[:400]
        try:
            loop.call_soon_threadsafe(tell, reason)
        except RuntimeError:  # the loop has ended; nobody asks any more
            return

    threading.Thread(target=run, name="palestra-judge", daemon=True).start()
    try:
        # Each call ends by the deadline; a little more is for the test's own work on the last answer.
        async with asyncio.timeout(max(0.0, end - time.monotonic()) + LOAD_S):
            return await outcome
    except TimeoutError:
        candidate.abandon("the test did not come to its end by the deadline")
        return candidate.over
    except asyncio.CancelledError:
        candidate.abandon("the check was given up")
        raise


@functools.cache
def driver_text() -> str:
    """The source of `inside.driver`, which runs in the box."""
    return (Path(__file__).parent / "inside" / "driver.py").read_text()
