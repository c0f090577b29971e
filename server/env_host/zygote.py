"""`python -P -m palestra.server.env_host.zygote FD SLOTS`: the process that environments are forked from.

It loads the environment's module, makes one environment to learn of it and to have its tasks built, and closes that; a session's process
is then a fork that shares all of this. Messages come from the host on socket FD, a descriptor with each new session; the memory of slots is
behind SLOTS. One thread: a fork of a process with several would have locks that nobody opens.

Waits for the host and for the ends of its children. When the host is gone it ends them and itself.
"""

from __future__ import annotations

import array
import gc
import logging
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from palestra.envs.core import MessageEnv
from palestra.envs.registry import load_env_class, make_env
from palestra.sandbox.inside.kernel import PR_SET_PDEATHSIG, prctl
from palestra.server.env_host import child, slots
from palestra.server.env_host.types import Served

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Longest message between host and zygote."""


class Zygote:
    """The children, by session."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, served: Served, memory_bytes: int) -> None:
        self._sock, self._memory, self._served, self._memory_bytes = sock, memory, served, memory_bytes
        self._pids: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Tells the host."""
        self._sock.send(orjson.dumps(message))

    def serve(self) -> None:
        """Until the host is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        prctl(PR_SET_PDEATHSIG, 0)  # from here on the host's end is seen, and what sessions started is ended too
        heard: list[Any] = [self._sock, self._woken]
        while True:
            select.select(heard, [], [])
            self._drain()
            self._collect()
            if select.select([self._sock], [], [], 0)[0] and not self._hear():
                return

    def _drain(self) -> None:
        try:
            os.read(self._woken, 4096)
        except BlockingIOError:
            return

    def _hear(self) -> bool:
        """One message; False where the host is gone."""
        data, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(array.array("i").itemsize))
        given = array.array("i")
        for level, kind, fds in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                given.frombytes(fds[: len(fds) - len(fds) % given.itemsize])
        if not data:
            return False
        message = orjson.loads(data)
        if message["op"] == "spawn":
            self._spawn(message, socket.socket(fileno=given[0]))
        elif (pid := self._pids.get(message["session"])) is not None:
            os.kill(pid, signal.SIGKILL)  # a child of ours that was not collected: nobody else can have its number
        return True

    def _spawn(self, message: Mapping[str, Any], client: socket.socket) -> None:
        session = int(message["session"])
        try:
            pid = os.fork()
        except OSError as error:
            client.close()
            self.tell({"event": "ended", "session": session, "status": None, "said": f"fork: {error.strerror}"})
            return
        if pid == 0:
            slot = slots.Slot(self._memory, int(message["slot"]))
            self._sock.close()
            os.close(self._woken)
            os.close(self._wake)
            child.live(client, bool(message["websocket"]), slot, self._served, self._memory_bytes)
        client.close()
        self._pids[session], self._sessions[pid] = pid, session

    def _collect(self) -> None:
        while self._pids:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # What it started is in its group, whose number is not given away before it is collected.
            self._end_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            session = self._sessions.pop(ended.si_pid, None)
            if session is not None:
                del self._pids[session]
                code = os.waitstatus_to_exitcode(status)
                self.tell({"event": "ended", "session": session, "status": code, "said": ""})

    def _end_group(self, pid: int) -> None:
        if pid not in self._sessions:
            return
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError) as error:  # it ended before it had a group, or alone
            logger.debug("group %d: %s", pid, error)

    def leave(self) -> None:
        """Ends all children and what they started."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._pids.values()):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._end_group(pid)
            os.waitpid(pid, 0)


def warm(served: Served) -> dict[str, Any]:
    """Makes an environment and closes it. What is known of it."""
    env = make_env(served.env_id, served.args)
    inner = env.unwrapped
    if not isinstance(inner, MessageEnv):
        raise TypeError(f"only a MessageEnv can be served, and {served.env_id} is a {type(inner).__name__}")
    doc = (type(inner).__doc__ or "").strip()
    about = {
        "name": served.env_id, "description": doc.split("\n\n")[0].replace("\n", " "), "tasks": len(inner.tasks),
        "tools": inner.tool_specs(),
    }  # fmt: skip
    env.close()
    return about


def main(argv: list[str]) -> int:
    """Greets the host with what is known of the environment, or with why it cannot be served; then serves."""
    sock = socket.socket(fileno=int(argv[0]))
    memory = slots.attach(int(argv[1]))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sock.set_inheritable(False)
    os.close(int(argv[1]))
    told = orjson.loads(sock.recv(MESSAGE_BYTES))
    sys.path += [entry for entry in told["path"] if entry not in sys.path]
    served = Served(told["env_id"], told["args"])
    zygote = Zygote(sock, memory, served, told["memory_bytes"])
    try:
        load_env_class(served.env_id)
        about = None if told["cold"] else warm(served)
    except Exception as error:
        logger.exception("%s cannot be served", served.env_id)
        zygote.tell({"event": "failed", "error": f"{type(error).__name__}: {error}"[:2000]})
        return 1
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it shares with this process
    zygote.tell({"event": "ready", "about": about, "threads": len(list(Path("/proc/self/task").iterdir()))})
    try:
        zygote.serve()
    finally:
        zygote.leave()
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    os.dup2(2, 1)  # what environments print is not for the host's caller
    sys.exit(main(sys.argv[1:]))
