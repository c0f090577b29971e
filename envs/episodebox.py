"""A box of the sandbox as an environment has it: blocking calls, each with a deadline, from the episode's own thread.

In: a box of the pool. Out: what code in it printed and how it ended, files, verdicts. Waits for the box. What a fault becomes:

    EnvError    the sandbox's doing: a box that was lost. The episode has no reward
    ToolError   a file that is not there, or no room for it: the model's doing, told to it
    ExecResult  how code ended is no fault; see `sandbox.types.Status`
    `broken`    the code broke its own box: its files are gone, and that counts as its doing
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from palestra.envs import background
from palestra.envs.types import EnvError, ToolError
from palestra.sandbox.artifacts import ArtifactError, check_names, read_artifacts
from palestra.sandbox.grading import Check, Grade
from palestra.sandbox.pool import Pool
from palestra.sandbox.types import (
    MIB,
    Box,
    BoxFileError,
    BoxProtocolError,
    ExecResult,
    SandboxError,
    Session,
    SessionKind,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN_S = 45.0
"""How much longer than a run's own deadline its answer is waited for: an interpreter may have to come up, and processes to end."""
FILE_S = 60.0
"""Most seconds for a file, and for giving a box back."""

Grader = Callable[[Mapping[str, bytes], Check, Mapping[str, bytes] | None, float], Grade]
"""Artifacts, check, tests and the check's seconds go in."""


class EpisodeBox:
    """One box, for one episode, in the episode's thread."""

    def __init__(self, pool: Pool, box: Box, grader: Grader) -> None:
        """`box`: of `pool`, which gets it back. `grader` grades in another box."""
        self._pool, self._box, self._grader = pool, box, grader
        self._pid = os.getpid()
        self._base = ""
        self.broken = ""
        """How the code in it broke it; "" while it has not."""
        self._lease = weakref.finalize(self, _give_back, pool, box, background.loop(), self._pid)
        self._lease.atexit = False

    def __enter__(self) -> EpisodeBox:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The sandbox's name of it."""
        return self._box.id

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        max_output: int | None = None,
    ) -> ExecResult:
        """Runs a program (a list) or a line of shell (a text) in /workspace.

        Raises:
            EnvError: the box was lost.
        """
        return self._run(
            self._box.exec(command, stdin=stdin, env=env, timeout=timeout_s, max_output=max_output), timeout_s
        )

    def run_python(
        self, code: str, *, stdin: bytes = b"", timeout_s: float = 30.0, max_output: int | None = None
    ) -> ExecResult:
        """Runs code in an interpreter in which nothing ran before.

        Raises:
            EnvError: the box was lost.
        """
        return self._run(self._box.run_python(code, stdin=stdin, timeout=timeout_s, max_output=max_output), timeout_s)

    def session(self, kind: SessionKind) -> BoxSession:
        """An interpreter that keeps its state between runs.

        Raises:
            EnvError: the box was lost. ToolError: there is no room for another process.
        """
        return BoxSession(self, self._ask(self._box.open_session(kind), "opening a session"))

    def put(self, path: str, data: bytes) -> None:
        """Writes a file; relative paths are below /workspace.

        Raises:
            EnvError: the box was lost. ToolError: it cannot be written.
        """
        self._ask(self._box.put(path, data), "writing a file")

    def get(self, path: str, max_bytes: int = MIB) -> bytes:
        """A regular file's content.

        Raises:
            EnvError: the box was lost. ToolError: no such file, or more than `max_bytes`.
        """
        return self._ask(self._box.get(path, max_bytes=max_bytes), "reading a file")

    def grade(
        self,
        artifacts: Sequence[str],
        check: Check,
        tests: Mapping[str, bytes] | None = None,
        timeout_s: float = 30.0,
    ) -> Grade:
        """The verdict on files of this box, from another one. This box is given back first: when all boxes of a pool are held by episodes
        that wait for their grader's, none is ever free.

        Raises:
            EnvError: there is no verdict, by a fault of ours.
            ValueError: as of `Boxes.grade`.
        """
        check_names(artifacts)
        try:
            if self.broken:
                return Grade(False, self.broken)
            work = self._ask(self._work(artifacts), "taking the work out")
        finally:
            self.close()
        return work if isinstance(work, Grade) else self._grader(work, check, tests, timeout_s)

    async def _work(self, artifacts: Sequence[str]) -> dict[str, bytes] | Grade:
        try:
            await self._box.kill_processes()
            return await read_artifacts(self._box, artifacts)
        except (ArtifactError, BoxProtocolError) as error:
            return Grade(False, str(error))

    def text(self, result: ExecResult) -> str:
        """What it printed, with the box's folder under the name that it has everywhere: texts of equal runs are equal."""
        if not self._base:
            return result.text
        return result.text.replace(f"{self._base}/workspace", "/workspace").replace(f"{self._base}/tmp", "/tmp")

    def learn_home(self) -> None:
        """Asks, before any other code runs, where /workspace really is.

        Raises:
            EnvError: the box was lost.
        """
        home = self.exec(["pwd"]).text.strip()
        self._base = home.removesuffix("/workspace") if home != "/workspace" else ""

    def close(self) -> None:
        """Gives the box back; it is destroyed. Safe to call twice."""
        if self._lease.detach() is None or os.getpid() != self._pid:
            return
        try:
            background.call(self._pool.release(self._box), FILE_S)
        except background.DeadlineError:
            logger.warning("box %s is still being destroyed after %g s", self._box.id, FILE_S)

    def _run(self, running: Coroutine[Any, Any, ExecResult], timeout_s: float) -> ExecResult:
        result = self._ask(running, "running code", timeout_s + MARGIN_S)
        if result.status == "infra_error":
            raise EnvError(f"sandbox: {result.message or 'the box was lost'}")
        if not self._box.alive:
            self.broken = result.message or result.status
        return result

    def _ask(self, asked: Coroutine[Any, Any, T], doing: str, timeout_s: float = FILE_S) -> T:
        if os.getpid() != self._pid or not self._lease.alive:
            asked.close()
            why = (
                "was given back" if os.getpid() == self._pid else "belongs to the process that this one was forked from"
            )
            raise EnvError(f"sandbox: {doing}: the box {why}")
        try:
            return wait_for(asked, timeout_s, doing)
        except BoxProtocolError as error:
            self.broken = str(error)
            raise ToolError(f"the box is broken: {error}") from None


class BoxSession:
    """An interpreter in a box."""

    def __init__(self, box: EpisodeBox, session: Session) -> None:
        self._box, self._session = box, session

    @property
    def alive(self) -> bool:
        """Whether it can run another cell."""
        return self._session.alive

    def run(self, code: str, timeout_s: float = 30.0, max_output: int | None = None) -> ExecResult:
        """Runs a cell.

        Raises:
            EnvError: the box was lost.
        """
        return self._box._run(self._session.run(code, timeout=timeout_s, max_output=max_output), timeout_s)

    def close(self) -> None:
        """Ends it, and what it started."""
        self._box._ask(self._session.close(), "closing a session")


def wait_for(asked: Coroutine[Any, Any, T], timeout_s: float, doing: str) -> T:
    """What the sandbox answers.

    Raises:
        BoxProtocolError: as it is. ToolError: a file's fault. EnvError: any other fault, or nothing within `timeout_s` seconds.
    """
    try:
        return background.call(asked, timeout_s)
    except BoxProtocolError:
        raise
    except BoxFileError as error:
        raise ToolError(str(error)) from None
    except (SandboxError, background.DeadlineError) as error:
        raise EnvError(f"sandbox: {doing}: {error}") from error


def _give_back(pool: Pool, box: Box, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """For a box that nobody closed. Runs where the collector happens to, so nothing is waited for."""
    if os.getpid() == pid and loop.is_running():
        asyncio.run_coroutine_threadsafe(pool.release(box), loop)
