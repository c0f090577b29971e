"""One run inside the box: a child with three pipes, what it writes, when it is over, and what is said about it.

In: a request and the agent's loop. Out: a reply. Nothing here blocks: the loop waits, and calls back.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import time

from . import commands, files, kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any

    from .agent import Agent
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start

CHUNK = 65536
NOT_FOUND, NOT_ALLOWED = 127, 126


class Stream:
    """What comes out of one pipe: its beginning is kept, the rest is counted."""

    __slots__ = ("fd", "kept", "total")

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.kept = bytearray()
        self.total = 0

    def read(self, keep: int) -> bool | None:
        """Reads once; None when there is nothing now, False at its end."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return None
        self.total += len(data)
        self.kept += data[: max(0, keep - len(self.kept))]
        return bool(data)

    def drain(self, keep: int, most: int) -> None:
        """Reads what is there now, at most about `most` bytes."""
        start = self.total
        while self.total - start < most and self.read(keep):
            continue

    def take(self) -> tuple[bytes, int]:
        """What was kept and how much there was; counting starts anew."""
        found = bytes(self.kept), self.total
        self.kept.clear()
        self.total = 0
        return found


class Feeder:
    """Writes a run's standard input as fast as it is read."""

    def __init__(self, agent: Agent, fd: int, data: bytes) -> None:
        self.agent, self.fd, self.data = agent, fd, memoryview(data)
        os.set_blocking(fd, False)
        agent.watch(fd, self._ready, write=True)

    def _ready(self) -> None:
        try:
            self.data = self.data[os.write(self.fd, self.data[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.data = self.data[:0]
        if not self.data:
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            self.agent.forget(self.fd)
            os.close(self.fd)
            self.fd = -1


class Job:
    """A command or a piece of Python, from its fork to its reply."""

    def __init__(self, agent: Agent, request: dict[str, Any], run: Callable[[], None]) -> None:
        """`run` is called in the child and ends it."""
        self.agent, self.request = agent, request
        self.keep = int(request["keep"])
        self.most = int(request["most"])
        self.started = time.monotonic()
        self.cpu_before = agent.reaper.cpu_s
        self.older = agent.reaper.present() if agent.leaders() else set()
        start = commands.spawn if agent.spawns and "argv" in request else None
        self.pid, (ins, outs, errs) = launch(agent, 3, request, run, start)
        agent.reaper.watched.add(self.pid)
        self.feeder = Feeder(agent, ins, request.get("stdin") or b"")
        self.streams = [Stream(outs), Stream(errs)]
        for stream in self.streams:
            agent.watch(stream.fd, self._reader(stream))
        self.pidfd = os.pidfd_open(self.pid)
        agent.watch(self.pidfd, self._ended)
        self.deadline: float | None = self.started + float(request["timeout"])

    def _reader(self, stream: Stream) -> Callable[[], None]:
        def readable() -> None:
            if stream.read(self.keep) is False:
                self.agent.forget(stream.fd)
            if sum(each.total for each in self.streams) > self.most:
                self.finish("output")

        return readable

    def _ended(self) -> None:
        # Its output may still be in the pipes. A descendant that holds them is not waited for.
        self.finish("")

    def expire(self) -> None:
        """Its deadline has come."""
        self.finish("timeout")

    def finish(self, why: str) -> None:
        """Ends what is left of it, and replies."""
        wall_s = time.monotonic() - self.started
        agent = self.agent
        agent.reaper.kill_job(self.pid, set(agent.leaders()), self.older)
        for stream in self.streams:
            stream.drain(self.keep, 2 * self.most)
            agent.forget(stream.fd)
            os.close(stream.fd)
        self.feeder.close()
        agent.forget(self.pidfd)
        os.close(self.pidfd)
        status, _ = agent.reaper.take(self.pid)
        (stdout, one), (stderr, two) = (stream.take() for stream in self.streams)
        if not why and one + two > self.most:
            why = "output"
        agent.done(
            self,
            {
                "why": why,
                "exit": os.waitstatus_to_exitcode(status),
                "stdout": stdout,
                "stderr": stderr,
                "total": one + two,
                "truncated": int(len(stdout) < one or len(stderr) < two),
                "wall_s": wall_s,
                "cpu_s": agent.reaper.cpu_s - self.cpu_before,
            },
        )


def launch(
    agent: Agent,
    count: int,
    request: dict[str, Any],
    run: Callable[[], None],
    start: Callable[[dict[str, Any], list[int]], int] | None = None,
) -> tuple[int, list[int]]:
    """Forks a child that has `count` pipes as its descriptors from 0 on, and calls `run` in it; or has `start` make one, if that can. The
    first pipe goes to the child, the others come from it; returned are its process id and our ends.

    Raises:
        OSError: no process or no descriptors could be had.
    """
    pipes: list[tuple[int, int]] = []
    try:
        pipes.extend(os.pipe() for _ in range(count))
        theirs = [pipes[0][0], *(pair[1] for pair in pipes[1:])]
        pid = _started(start, request, theirs)
        if pid < 0:
            pid = os.fork()
    except OSError:
        for pair in pipes:
            os.close(pair[0])
            os.close(pair[1])
        raise
    if pid == 0:
        become_child(theirs, request, agent.limits, run)
    for fd in theirs:
        os.close(fd)
    return pid, [pipes[0][1], *(pair[0] for pair in pipes[1:])]


def _started(start: Callable[[dict[str, Any], list[int]], int] | None, request: dict[str, Any], fds: list[int]) -> int:
    """The process that `start` has made; -1 where it cannot: a forked child will say why."""
    if start is None:
        return -1
    try:
        return start(request, fds)
    except (OSError, NotImplementedError, ValueError, TypeError, LookupError):
        return -1


def become_child(fds: list[int], request: dict[str, Any], limits: dict[str, int], run: Callable[[], None]) -> None:
    """In a forked child: becomes a run of its own on these descriptors, and never returns."""
    code = 1
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(len(fds), 1024)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        # The kernel's first choice when memory runs out must be the code, not the agent. A file that is not there: no /proc in this box.
        # (A file object costs a tenth of a short command.)
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, b"1000")
            os.close(fd)
        except OSError:
            os.write(2, b"")
        if limits:
            kernel.limit(limits)
        if kernel.NESTED:
            kernel.nest()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if request.get("env"):
            os.environ.update(request["env"])
        os.chdir(files.at(request.get("cwd") or "."))
        run()
        code = 0
    except FileNotFoundError as error:
        os.write(2, f"{error.filename or ''}: not found\n".encode("utf-8", "replace"))
        code = NOT_FOUND
    except OSError as error:
        os.write(2, f"{error.filename or ''}: {error.strerror}\n".encode("utf-8", "replace"))
        code = NOT_ALLOWED
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def warm_up() -> None:
    """Has the interpreter make what it makes when it first compiles something; else every forked child would, at twice its own cost."""
    exec(compile(WARM, "<warm>", "exec"), {})
    gc.collect()
    gc.freeze()


WARM = """
def f(a, *b, c=1):
    try:
        return [x for x in b if x] + [a]
    except ValueError as error:
        raise
class C:
    d = {"k": f"{1:>2}"}
for i in range(2):
    f(i)
"""


def run_python(request: dict[str, Any]) -> None:
    """In the child: runs code as the main module of this interpreter, which nothing ran in before, and ends."""
    prepare_interpreter()
    code = 0
    try:
        main = type(sys)("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        sys.argv = ["-c"]
        exec(compile(request["code"], "<code>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace.tb_next if trace else None), error.__traceback__)
        code = 1
    leave(code)


def prepare_interpreter() -> None:
    """Makes a forked interpreter as good as new: Ctrl-C interrupts, `exit` is there without `site`, numpy's numbers are drawn anew."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    drawn = sys.modules.get("numpy.random")
    if drawn is not None:
        drawn.seed()


def exit_code(error: SystemExit) -> int:
    """What an interpreter would exit with."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def leave(code: int) -> None:
    """Ends the interpreter as its own end would: threads are joined, exit handlers run, output is flushed."""
    threads = sys.modules.get("threading")
    if threads is not None:
        threads._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the code
            code = code or 120
    os._exit(code)
