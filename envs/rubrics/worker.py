"""The process that killable graders run in: takes calls from a socket, one after the other, until the other end is gone.

Run as a program by `processes`, with nothing but the standard library, so that it starts at once. A frame is a length of four bytes and a
pickle. In: ("path", sys.path), then ("load", module, qualname, name of what warms it) and ("run", module, qualname, arguments). Out: ("ok",
result), ("error", text), or ("lost", text) where the process ends after it. Both ends are ours: what a model wrote travels as text inside
of the arguments.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import sys
import time
from functools import reduce
from typing import Any

_PR_SET_PDEATHSIG = 1
FRAME_LIMIT = 64 * 2**20
"""Bytes of one frame."""
ERROR_CHARACTERS = 500
"""Of what a failing grader says."""


class FrameError(Exception):
    """The other end is gone, or what it sent is no frame of ours."""


def send_frame(sock: socket.socket, value: Any) -> None:
    """Writes one frame; waits as long as the socket's timeout says.

    Raises:
        FrameError: it is too large. OSError: the other end is gone.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    if len(data) > FRAME_LIMIT:
        raise FrameError(f"a frame of {len(data)} bytes is over the limit of {FRAME_LIMIT}")
    sock.sendall(len(data).to_bytes(4, "big") + data)


def receive_frame(sock: socket.socket, deadline: float | None = None) -> Any:
    """Reads one frame, at most until `deadline` on the monotonic clock.

    Raises:
        TimeoutError: the deadline passed. FrameError: the other end is gone, or the frame is too large.
    """
    size = int.from_bytes(_exactly(sock, 4, deadline), "big")
    if size > FRAME_LIMIT:
        raise FrameError(f"a frame of {size} bytes is over the limit of {FRAME_LIMIT}")
    return pickle.loads(_exactly(sock, size, deadline))


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline passed")
            sock.settimeout(left)
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise FrameError("the other end is gone")
        data += part
    return bytes(data)


def main(descriptor: int, parent: int, memory_bytes: int) -> None:
    """Serves the socket `descriptor`. `parent`: the process to die with. `memory_bytes`: of address space."""
    # The thread that started this one lives as long as its process: see `processes`. The end of the socket is not enough, since code
    # that holds the interpreter's lock would not see it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as sock:
        while _serve(sock):
            continue


def _serve(sock: socket.socket) -> bool:
    """Answers one request; False where there will be no other."""
    try:
        request = receive_frame(sock)
    except (FrameError, ConnectionError):
        return False
    try:
        reply = "ok", _answer(*request)
    except BaseException as fault:  # noqa: BLE001 - whatever a grader raises is told, SystemExit included
        # After a MemoryError what is left of the heap is not to be trusted with another call.
        last = isinstance(fault, MemoryError)
        send_frame(sock, ("lost" if last else "error", f"{type(fault).__name__}: {fault}"[:ERROR_CHARACTERS]))
        return not last
    try:
        send_frame(sock, reply)
    except (TypeError, AttributeError, pickle.PicklingError, FrameError) as fault:
        send_frame(sock, ("error", f"its result cannot be sent: {type(fault).__name__}: {fault}"[:ERROR_CHARACTERS]))
    return True


def _answer(kind: str, *rest: Any) -> Any:
    if kind == "path":
        (sys.path[:],) = rest
        return None
    module, qualname, more = rest
    function = _find(module, qualname)
    if kind == "load":
        return _find(module, more)() if more else None
    positional, named = pickle.loads(more)
    # A module that is decorated with `killable` has the wrapper under the function's own name.
    return getattr(function, "function", function)(*positional, **named)


def _find(module: str, qualname: str) -> Any:
    return reduce(getattr, qualname.split("."), importlib.import_module(module))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
