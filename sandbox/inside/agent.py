"""The agent: process 1 of a box. Runs what its supervisor asks for, one thing at a time, and leaves nothing of it running.

In: frames on a descriptor; the first is `setup`. Out: a frame for each. It ends when the supervisor goes away, and the box with it.

    setup      mode, limits, preload, packages, env, home, cgroup (1: count what it counts) -> pid, python, missing
    exec       argv (list or text), stdin, env, cwd, timeout, keep, most -> result
    python     code, stdin, env, cwd, timeout, keep, most -> result
    open       kind -> session; what runs is not waited for
    cell       session, code, timeout, keep, most -> result, alive
    interrupt  session; answered at once, also while a cell runs
    shut       session; a cell that runs in it is answered first
    write read list folder link   files, in pieces
    clean      ends everything but the agent
    result     why ("" timeout output lost), exit (negative: a signal), stdout, stderr, total, truncated, wall_s, cpu_s
"""

from __future__ import annotations

import os
import select
import sys
import time

from . import commands, files, jobs, kernel, sessions
from .frames import FrameError, Inbox, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, Protocol

    class Foreground(Protocol):
        """What runs now: a job or a session's cell."""

        request: dict[str, Any]
        deadline: float | None

        def expire(self) -> None: ...
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start


LOOK_S, LOOK_SELDOM_S = 0.02, 0.2
"""How often orphans are collected while a run or a session may leave some: at first, and when there were none for a while."""


LEAST_FILES = 64
"""Descriptors that the agent itself may need, some sessions included."""


class Agent:
    """The loop. Descriptors have callbacks, the one running thing has a deadline."""

    def __init__(self, control_in: int, control_out: int) -> None:
        self.control_in, self.control_out = control_in, control_out
        self.inbox = Inbox()
        self.poll = select.poll()
        self.callbacks: dict[int, Callable[[], None]] = {}
        self.running: Foreground | None = None
        self.sessions: dict[int, sessions.Session] = {}
        self.opened = 0
        self.reaper = kernel.Reaper(kernel.TREE)
        self.limits: dict[str, int] = {}
        self.spawns = False
        self.warm = False
        self.cgroup: kernel.Cgroup | None = None
        self.watch(control_in, self._control)
        self.look_s, self.look_at = LOOK_S, 0.0

    def watch(self, fd: int, ready: Callable[[], None], *, write: bool = False) -> None:
        """Calls `ready` whenever the descriptor can be read (or written), or its other end closed."""
        self.callbacks[fd] = ready
        self.poll.register(fd, select.POLLOUT if write else select.POLLIN)

    def forget(self, fd: int) -> None:
        """Watches it no more; safe to call twice."""
        if self.callbacks.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def leaders(self) -> list[int]:
        """Process ids of open sessions."""
        return [session.pid for session in self.sessions.values() if session.alive]

    def others(self) -> set[int]:
        """Process ids of open sessions, and of the job that runs."""
        running = self.running
        return {*self.leaders(), *([running.pid] if isinstance(running, jobs.Job) else [])}

    def serve(self) -> None:
        """For ever."""
        while True:
            running = self.running
            ready = [(fd, self.callbacks[fd]) for fd, _ in self.poll.poll(self._wait_ms())]
            for fd, callback in ready:
                # One of this round may have closed it, and another got its number.
                if self.callbacks.get(fd) is callback:
                    callback()
            if running is not None and running is self.running and _due(running):
                running.expire()
            if time.monotonic() >= self.look_at:
                self._look()

    def _wait_ms(self) -> float | None:
        """Until the deadline, or until orphans are looked for: they count against the box's processes until somebody collects them. A
        signal for each would cost every run a tenth of its time."""
        if self.running is None and not self.leaders():
            return None
        until = self.look_at
        if self.running is not None and self.running.deadline is not None:
            until = min(until, self.running.deadline)
        return max(0.0, until - time.monotonic()) * 1000

    def _look(self) -> None:
        before = self.reaper.collected
        self.reaper.collect()
        self.look_s = LOOK_S if self.reaper.collected > before else min(2 * self.look_s, LOOK_SELDOM_S)
        self.look_at = time.monotonic() + self.look_s

    def _control(self) -> None:
        data = os.read(self.control_in, jobs.CHUNK)
        if not data:
            self.leave()
        try:
            requests = self.inbox.feed(data)
        except FrameError:
            self.leave()
        for request in requests:
            self.handle(request)

    def leave(self) -> None:
        """The supervisor is gone: nothing of the box may outlive it."""
        self.reaper.kill_all()
        os._exit(0)

    def handle(self, request: dict[str, Any]) -> None:
        """Answers a request, or begins what will be answered when it is over."""
        operation = request.get("op")
        try:
            if operation in ("exec", "python", "cell"):
                self._begin(operation, request)
            else:
                self.answer(request, OPERATIONS[str(operation)](self, request))
        except OSError as error:
            self.answer(request, {"error": error.strerror or str(error), "errno": error.errno or 0})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self.answer(request, {"error": f"{type(error).__name__}: {error}", "errno": 0})

    def _begin(self, operation: str, request: dict[str, Any]) -> None:
        if self.running is not None:
            raise RuntimeError("something runs already")
        self.look_s, self.look_at = LOOK_S, time.monotonic() + LOOK_S
        if self.cgroup is not None:
            self.cgroup.begin()
        if operation == "cell":
            session = self.sessions.get(request["session"])
            if session is None or not session.alive:
                self.answer(request, sessions.lost("the session is over; open another"))
            else:
                self.running = session.begin(request)
        elif operation == "python":
            if not self.warm:
                self.warm = True
                jobs.warm_up()
            self.running = jobs.Job(self, request, lambda: jobs.run_python(request))
        else:
            self.running = jobs.Job(self, request, lambda: commands.run(request))

    def done(self, what: Foreground, result: dict[str, Any]) -> None:
        """What ran is over."""
        if self.running is what:
            self.running = None
        if self.cgroup is not None:
            result.update(self.cgroup.since())
        self.answer(what.request, result)

    def answer(self, request: dict[str, Any], reply: dict[str, Any]) -> None:
        """Sends a reply; the supervisor that does not read it is gone."""
        reply["id"] = request.get("id")
        try:
            data = memoryview(pack(reply))
        except FrameError as error:  # a folder full of long names, for one
            data = memoryview(pack({"error": f"no answer: {error}", "errno": 0, "id": request.get("id")}))
        try:
            while data:
                data = data[os.write(self.control_out, data) :]
        except OSError:
            self.leave()

    def setup(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first request: what the box is like."""
        kernel.become_ancestor(request["mode"])
        self.reaper.mode = request["mode"]
        self.limits = dict(request["limits"])
        if request.get("cgroup"):
            self.cgroup = kernel.Cgroup()
        files.HOME = request["home"]
        files.PLACES = dict(request.get("places") or {})
        kernel.NESTED = bool(request.get("nested"))
        self._inherit()
        os.environ.clear()
        os.environ.update(request["env"])
        if request.get("packages"):
            sys.path.append(request["packages"])
        missing = []
        for name in request["preload"]:
            try:
                __import__(name)
            except ImportError as error:
                missing.append(f"{name}: {error}")
        return {"pid": os.getpid(), "python": ".".join(map(str, sys.version_info[:3])), "missing": missing}

    def _inherit(self) -> None:
        """Takes limits on itself that it can bear, so that programs inherit them and can be spawned."""
        if (
            kernel.NESTED
            or not set(self.limits) <= {"open_files", "file_bytes"}
            or self.limits.get("open_files", 0) < LEAST_FILES
        ):
            return
        kernel.limit(self.limits)
        self.limits = {}
        self.spawns = True

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Starts a session."""
        session = sessions.start(self, request["kind"])
        self.opened += 1
        self.sessions[self.opened] = session
        return {"session": self.opened}

    def interrupt(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ctrl-C to a session."""
        session = self.sessions.get(request["session"])
        if session is not None:
            session.interrupt()
        return {}

    def shut(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ends a session and what it started."""
        session = self.sessions.pop(request["session"], None)
        if session is not None:
            session.end()
        return {}

    def clean(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ends everything. What ran is answered first."""
        for session in self.sessions.values():
            session.end("lost", "everything in the box was ended; open another session")
        self.sessions.clear()
        if self.running is not None:
            self.running.expire()
        self.reaper.kill_all()
        return {}


def _due(running: Foreground) -> bool:
    return running.deadline is not None and time.monotonic() >= running.deadline


OPERATIONS: dict[str, Callable[[Agent, dict[str, Any]], dict[str, Any]]] = {
    "setup": Agent.setup,
    "open": Agent.open,
    "interrupt": Agent.interrupt,
    "shut": Agent.shut,
    "clean": Agent.clean,
    "write": lambda agent, request: files.write(request),
    "read": lambda agent, request: files.read(request),
    "list": lambda agent, request: files.listing(request),
    "folder": lambda agent, request: files.folder(request),
    "link": lambda agent, request: files.link(request),
}


def main(control_in: int, control_out: int) -> None:
    """Serves until the supervisor goes away. `control_in` and `control_out` may be one socket, or a container's standard streams."""
    if control_in <= 2 or control_out <= 2:
        null = os.open("/dev/null", os.O_RDWR)
        moved = os.dup(control_in), os.dup(control_out)
        # Its stderr stays: an engine keeps what it says, should it fail.
        for fd in (0, 1):
            os.dup2(null, fd)
        control_in, control_out = moved
    os.set_inheritable(control_in, False)
    os.set_inheritable(control_out, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Agent(control_in, control_out).serve()
