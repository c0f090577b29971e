"""Sessions: interpreters of a box that keep their state between cells.

In: cells, one at a time, each under a token of its own that the interpreter has to give back. Out: replies by `Agent.done`. What
the interpreter says of its cell's status is its own word; time, output and whether it lives are seen from here. Nothing here
blocks: the agent's loop waits, and calls back.
"""

from __future__ import annotations

import os
import time

from . import jobs, kernel
from .bash_session import Bash
from .python_session import TOKEN, Python

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from .agent import Agent
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start

BETWEEN = 65536
"""Bytes kept of each stream of what is written between cells; the next cell's output begins with it."""
DRAIN = 1 << 20
"""Most bytes of a pipe: a cell's last output is in it when its status comes."""
START_S = 20.0
"""Seconds that a cell waits for an interpreter that is not ready."""
STEP_S, STEPS = 0.5, 2
"""Ctrl-C is sent so often and this far apart before a session is killed. The second is for programs that a loop starts anew."""
LONGEST_REPORT = TOKEN + 8
KINDS: dict[str, Callable[[], Python | Bash]] = {"python": Python, "bash": Bash}


class Cell:
    """What a session runs now."""

    def __init__(self, session: Session, request: dict[str, Any]) -> None:
        self.session, self.request = session, request
        self.keep, self.most = int(request["keep"]), int(request["most"])
        self.timeout = float(request["timeout"])
        self.token = new_token()
        self.typed = session.dialect.cell(self.token, request["code"])
        self.sent = self.begun = self.interrupted = False
        self.code: int | None = None
        self.why = ""
        self.steps = 0
        self.started = time.monotonic()
        self.deadline: float | None = self.started + START_S + self.timeout

    def expire(self) -> None:
        """Its deadline has come, or its time after the last Ctrl-C."""
        self.stop(self.why or "timeout")

    def stop(self, why: str) -> None:
        """Interrupts it; if that did not help, kills the session."""
        self.why = why
        if not self.begun or self.steps == STEPS:
            self.session.end(why)
            return
        self.steps += 1
        self.deadline = time.monotonic() + STEP_S
        self.session.interrupt()


class Typist:
    """Writes to an interpreter as fast as it reads."""

    def __init__(self, agent: Agent, fd: int) -> None:
        self.agent, self.fd = agent, fd
        self.left = bytearray()
        os.set_blocking(fd, False)

    def type(self, data: bytes) -> None:
        """Takes bytes, and writes those that fit."""
        waits = bool(self.left)
        self.left += data
        if not waits and self.fd >= 0:
            self._ready()
            if self.left:
                self.agent.watch(self.fd, self._ready, write=True)

    def _ready(self) -> None:
        try:
            del self.left[: os.write(self.fd, self.left[: jobs.CHUNK])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended, or closed its end: its status tells
            self.left.clear()
        if not self.left:
            self.agent.forget(self.fd)

    def close(self) -> None:
        """Safe to call twice."""
        if self.fd >= 0:
            self.agent.forget(self.fd)
            os.close(self.fd)
            self.fd = -1
        self.left.clear()


class Session:
    """One interpreter, the leader of a process group and session of its own."""

    def __init__(self, agent: Agent, dialect: Python | Bash) -> None:
        """Starts it.

        Raises:
            OSError: no process could be had.
        """
        self.agent, self.dialect = agent, dialect
        self.alive = True
        self.cell: Cell | None = None
        self.ready = False
        self.report = b""
        self.pid, (typed, *outs, self.said) = jobs.launch(agent, 4, {}, dialect.become)
        agent.reaper.watched.add(self.pid)
        self.typist = Typist(agent, typed)
        self.streams = [jobs.Stream(fd) for fd in outs]
        for stream in self.streams:
            agent.watch(stream.fd, self._reader(stream))
        os.set_blocking(self.said, False)
        agent.watch(self.said, self._listen)
        self.pidfd = os.pidfd_open(self.pid)
        agent.watch(self.pidfd, self._ended)
        self.cpu_before = 0.0
        self.before = 0
        self.awaited = [new_token()]
        self.typist.type(dialect.opening(self.awaited[0]))

    def begin(self, request: dict[str, Any]) -> Cell:
        """Starts a cell; the agent is told by `done` when it is over.

        Raises:
            ValueError: such a cell cannot be run.
        """
        self.cell = cell = Cell(self, request)
        if not self.awaited:
            self._send(cell)
        return cell

    def _send(self, cell: Cell) -> None:
        cell.sent = True
        self.awaited.append(cell.token)
        self.typist.type(cell.typed)

    def _begun(self, cell: Cell) -> None:
        self.cpu_before = kernel.cpu_of(self.pid)
        self.before = sum(stream.total for stream in self.streams)
        cell.begun = True
        cell.started = time.monotonic()
        cell.deadline = cell.started + cell.timeout
        if cell.interrupted:
            self.interrupt()

    def _reader(self, stream: jobs.Stream) -> Callable[[], None]:
        def readable() -> None:
            cell = self.cell
            if stream.read(BETWEEN if cell is None else cell.keep) is False:
                self.agent.forget(stream.fd)
            if cell is not None and cell.begun and not cell.why and self._written() > cell.most:
                cell.stop("output")

        return readable

    def _written(self) -> int:
        return sum(stream.total for stream in self.streams) - self.before

    def _listen(self) -> None:
        """A report, or the end of all reports."""
        try:
            data = os.read(self.said, jobs.CHUNK)
        except BlockingIOError:
            return
        if not data:
            # Another program took its place, or the code closed it. The first may go on to its end; nothing else will come.
            self.agent.forget(self.said)
            self.typist.close()
            return
        *lines, self.report = (self.report + data).split(b"\n")
        for line in lines:
            if self.alive and not self._reported(line):
                self.end("lost", "its report did not bear the cell's token; open another session")
        if self.alive and len(self.report) > LONGEST_REPORT:
            self.end("lost", "what it reported is no report; open another session")

    def _reported(self, line: bytes) -> bool:
        token, _, code = line.partition(b" ")
        cell = self.cell
        if token not in self.awaited:
            return False
        if code == b"begun":
            if cell is None or cell.token != token:
                return not self.ready
            if not cell.begun:
                self._begun(cell)
                return True
        if not code.isdigit() or len(code) > 3 or int(code) > 255:
            return False
        del self.awaited[: self.awaited.index(token) + 1]
        if not self.ready:
            self.ready = True
            for stream in self.streams:  # what a shell says when it starts
                stream.drain(0, DRAIN)
                stream.take()
        if cell is None:
            return True
        if cell.sent and cell.code is None and cell.token not in self.awaited:
            cell.code = int(code)
        # What a late Ctrl-C makes a shell write belongs to this cell too, so the report behind it is waited for.
        if cell.code is not None and not self.awaited:
            self._finish(cell, cell.code, kernel.cpu_of(self.pid) - self.cpu_before)
        elif not cell.sent and not self.awaited:
            self._send(cell)
        return True

    def _ended(self) -> None:
        self.end("lost")

    def interrupt(self) -> None:
        """Ctrl-C to what runs; nothing where nothing does. A shell that is still reading a cell would lose the half of it that it has,
        so a cell that has not begun is interrupted when it does."""
        if self.cell is None or self.cell.code is not None:
            return
        if not self.cell.begun:
            self.cell.interrupted = True
            return
        for number in (signal.SIGINT, signal.SIGCONT):  # what is stopped can then give in
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has just ended
                return
        token = new_token()
        lines = self.dialect.sync(token)
        if lines:
            self.awaited.append(token)
            self.typist.type(lines)

    def end(self, why: str = "lost", message: str = "the session was closed") -> None:
        """Kills it, what it started and strays, and answers its cell if one runs. Safe to call twice."""
        if not self.alive:
            return
        self.alive = False
        agent, cell = self.agent, self.cell
        wall_s = 0.0 if cell is None else time.monotonic() - cell.started
        natural = agent.reaper.gone(self.pid)
        agent.reaper.kill_session(self.pid, agent.others())
        status, cpu_s = agent.reaper.take(self.pid)
        code = os.waitstatus_to_exitcode(status)
        if natural:
            message = f"the interpreter ended {_how(code)}, and the session with it; open another"
        if cell is not None:
            self._finish(cell, code, cpu_s - self.cpu_before, why, message, wall_s)
        self.typist.close()
        for fd in (self.said, self.pidfd, *(stream.fd for stream in self.streams)):
            agent.forget(fd)
            os.close(fd)

    def _finish(
        self, cell: Cell, code: int, cpu_s: float, why: str = "", message: str = "", wall_s: float | None = None
    ) -> None:
        if wall_s is None:
            wall_s = time.monotonic() - cell.started
        for stream in self.streams:
            stream.drain(cell.keep, DRAIN)
        why = cell.why or why or ("output" if self._written() > cell.most else "")
        (stdout, one), (stderr, two) = (stream.take() for stream in self.streams)
        stdout, stderr = (
            stdout[: cell.keep],
            stderr[: cell.keep],
        )  # more than this cell wants may be there from before it
        if cell.why:
            end = "interrupted; the session goes on" if self.alive else "killed, and the session with it"
            message = f"{'it wrote too much' if why == 'output' else 'its time was up'}: {end}"
        self.cell = None
        self.agent.reaper.collect()
        self.agent.done(
            cell,
            {
                "why": why,
                "exit": code,
                "stdout": stdout,
                "stderr": stderr,
                "total": one + two,
                "truncated": int(len(stdout) < one or len(stderr) < two),
                "wall_s": wall_s,
                "cpu_s": max(0.0, cpu_s),
                "alive": int(self.alive),
                "message": message,
            },
        )


def new_token() -> bytes:
    """What only the one who asked, and the one who was asked, can know."""
    return os.urandom(TOKEN // 2).hex().encode()


def _how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def start(agent: Agent, kind: str) -> Session:
    """An interpreter of this kind.

    Raises:
        RuntimeError: it is not in this box.
        ValueError: no such kind.
        OSError: no process could be had.
    """
    if kind not in KINDS:
        raise ValueError(f"no sessions of kind {kind}; known: {', '.join(KINDS)}")
    return Session(agent, KINDS[kind]())


def lost(message: str) -> dict[str, Any]:
    """The result of a cell whose session is over."""
    nothing: dict[str, Any] = {"stdout": b"", "stderr": b"", "total": 0, "truncated": 0, "wall_s": 0.0, "cpu_s": 0.0}
    return {"why": "lost", "exit": -9, **nothing, "alive": 0, "message": message}
