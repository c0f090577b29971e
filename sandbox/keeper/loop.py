"""The keeper's loop: one thread, one socket to the service, any number of boxes.

In: messages of `inside.frames` as datagrams. Out: an answer to each, and events.

    spawn   box, mode, argv, files, own_user, limits (or None), watch, folder (0 or 1), confine; with the box's socket -> pid
    kill    box -> status, said; when all of it is gone
    stage   source -> path: the same folder or file where other users can reach it
    event   ended (box, status, said): its first process ended by itself; oom (box): the watchdog kills

When the service is gone everything is ended and cleared, and the keeper ends. Waits for the service and for processes to end.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import struct
import time

from palestra.sandbox import cgroups
from palestra.sandbox.inside.frames import pack, unpack
from palestra.sandbox.inside.kernel import PR_SET_CHILD_SUBREAPER, prctl
from palestra.sandbox.keeper import folders, owners, watchdog
from palestra.sandbox.keeper.boxes import Boxes
from palestra.sandbox.keeper.stage import Stage
from palestra.sandbox.keeper.users import Users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

AGAIN_S = 0.004
"""How soon a box that is ending is looked at again, beside when a process of it ends."""
MESSAGE_BYTES = 1 << 18
"""Longest message."""
LEAVE_S = 20.0
"""Most time for clearing up when the service is gone."""


class Keeper:
    """See the module."""

    def __init__(self, sock: socket.socket, service: int) -> None:
        self.sock, self.service = sock, service
        self.unsent: list[bytes] = []
        self.poll = select.poll()
        self.wake = _wake_on_child()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.owner = owners.name_of(service, os.getpid())
        where, self.why = cgroups.find()
        self.where, self.why = _proven(where, self.owner, self.why)
        self.users = Users() if os.getuid() == 0 else None
        self.folders = folders.base()
        self.stage = Stage(self.folders)
        self.boxes = Boxes(self.where, self.users, self.owner, self.folders, self.tell)
        self.next_look = time.monotonic()

    def greet(self) -> None:
        """The first message: what this machine has."""
        self.tell(
            {
                "event": "hello",
                "owner": self.owner,
                "root": int(self.users is not None),
                "version": self.where.version if self.where else 0,
                "bases": [list(pair) for pair in self.where.bases] if self.where else [],
                "why": self.why,
                "folders": self.folders,
            }
        )

    def serve(self) -> None:
        """Until the service is gone."""
        alive = os.pidfd_open(self.service)
        self.poll.register(alive, select.POLLIN)
        self.poll.register(self.wake, select.POLLIN)
        self._register()
        while True:
            ready = {fd for fd, _ in self.poll.poll(self._patience_ms())}
            if self.wake.fileno() in ready:
                self.wake.recv(4096)
                self.boxes.collect()
            elif self.boxes.unfinished:
                self.boxes.step()
            self._watch()
            if self.sock.fileno() in ready and not (self._flush() and self._requests()):
                return
            if alive in ready:
                return

    def leave(self) -> None:
        """Ends and clears everything."""
        end = time.monotonic() + LEAVE_S
        self.boxes.end_all()
        while self.boxes.kept and time.monotonic() < end:
            self.boxes.collect()
            select.select([self.wake], [], [], AGAIN_S)
        if self.where is not None:
            cgroups.clear(self.where, self.owner, lambda: time.sleep(AGAIN_S))
        folders.remove(self.folders, self.owner)

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message, now or when there is room."""
        self.unsent.append(pack(message)[4:])
        self._flush()

    def _flush(self) -> bool:
        """Sends what there is room for; False when the service is gone."""
        try:
            while self.unsent:
                self.sock.send(self.unsent[0], socket.MSG_DONTWAIT)
                del self.unsent[0]
        except BlockingIOError:
            pass_on = True
        except OSError:
            self.unsent.clear()
            pass_on = False
        else:
            pass_on = True
        self._register()
        return pass_on

    def _register(self) -> None:
        self.poll.register(self.sock, select.POLLIN | (select.POLLOUT if self.unsent else 0))

    def _patience_ms(self) -> float | None:
        if self.boxes.unfinished:
            return AGAIN_S * 1000
        if any(kept.watch for kept in self.boxes.kept.values()):
            return watchdog.EVERY_S * 1000
        return None

    def _watch(self) -> None:
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + watchdog.EVERY_S
            watchdog.look(self.boxes.kept.values(), self.tell)

    def _requests(self) -> bool:
        """Takes what has come; False when the service is gone."""
        while True:
            try:
                data, given = _receive(self.sock)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            self._handle(unpack(data), given)

    def _handle(self, request: dict[str, Any], fds: list[int]) -> None:
        try:
            if request["op"] == "spawn":
                kept = self.boxes.spawn(request, fds.pop(), _confinement(request))
                self.tell({"id": request["id"], "pid": kept.pid})
            elif request["op"] == "kill":
                self.boxes.end(request["box"], request["id"])
            else:
                self.tell({"id": request["id"], "path": self.stage.put(request["source"])})
        except (OSError, ImportError, ValueError) as error:
            self.tell({"id": request["id"], "error": str(error)[:2000]})
        finally:
            for fd in fds:
                os.close(fd)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it. Not `socket.recv_fds`: CPython 3.11's forgets its flags."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, extra, _, _ = sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4), flags)
    fds: list[int] = []
    for level, kind, payload in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(payload) // 4}i", payload)
    return data, fds


def _confinement(request: dict[str, Any]) -> Callable[[dict[str, Any]], None] | None:
    if request["confine"] is None:
        return None
    # Loaded by who needs it, in the keeper: its children find it there.
    module = importlib.import_module("palestra.sandbox.keeper.confine")
    found: Callable[[dict[str, Any]], None] = module.confine
    return found


def _wake_on_child() -> socket.socket:
    """A socket that can be read when a child has ended."""
    read, write = socket.socketpair()
    read.setblocking(False)
    write.setblocking(False)
    signal.set_wakeup_fd(write.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return read


def _proven(where: cgroups.Hierarchy | None, owner: str, why: str) -> tuple[cgroups.Hierarchy | None, str]:
    """The hierarchy if a process can really be put into a group of it, and why not."""
    if where is None:
        return None, why
    groups = where.folders(owner, "proof")
    try:
        cgroups.make(where, owner, "proof", memory=64 << 20, pids=16, cpus=0.5)
        pid = os.fork()
        if pid == 0:
            try:
                cgroups.enter(groups)
                os._exit(0)
            except OSError as error:
                os._exit(error.errno or 1)
        failed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as error:
        failed, why = error.errno or 1, f"{error.filename}: {error.strerror}"
    cgroups.remove(groups)
    if not failed:
        return where, why
    cgroups.remove(where.folders(owner))
    return None, why or f"a process cannot enter a group of its own: {os.strerror(failed)}"
