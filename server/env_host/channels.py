"""How an environment's process hears its client: a WebSocket that the host handed over, or a pipe to the host for its plain HTTP routes.

Messages come out as bytes, answers go in. `receive` and `send` wait for the other side without a deadline of their own: the host ends a
process that waits too long.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import struct
import threading
from typing import Protocol

from palestra.server.env_host.websocket import (
    CLOSE,
    NORMAL,
    NOT_ACCEPTED,
    PING,
    PONG,
    TEXT,
    BrokenSocketError,
    Frames,
    closing,
    frame,
)

PIECE = 1 << 16
"""Bytes that are read at a time."""
AHEAD = 16
"""Messages that are taken in while a step is still going on."""
LENGTH = struct.Struct(">I")


class Channel(Protocol):
    """One client."""

    def receive(self) -> bytes | None:
        """The next message; None when the client is gone."""

    def send(self, message: bytes) -> None:
        """Sends an answer.

        Raises:
            OSError: the client is gone.
        """

    def attend(self) -> None:
        """Called now and then from another thread while a step takes long: keeps the connection alive. Waits for nothing."""

    def close(self) -> None:
        """No further message."""


class PipeChannel:
    """Messages with their length in front, over one end of a socket pair. One request at a time comes from the host, so that nothing
    else has to be looked at meanwhile.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> bytes | None:
        head = self._exactly(LENGTH.size)
        return self._exactly(LENGTH.unpack(head)[0]) if head else None

    def _exactly(self, count: int) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            data = self._sock.recv(min(count - len(found), PIECE))
            if not data:
                return None
            found += data
        return bytes(found)

    def send(self, message: bytes) -> None:
        self._sock.sendall(LENGTH.pack(len(message)) + message)

    def attend(self) -> None:
        """The host sends no pings."""

    def close(self) -> None:
        self._sock.close()


class WebSocketChannel:
    """A client's own connection: between a step and its client there is no process but this one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames()
        self._ready: collections.deque[bytes] = collections.deque()
        self._over = False
        self._lock = threading.Lock()
        """Held by whoever reads or writes; `receive` holds it while it waits, and then `attend` has nothing to do."""

    def receive(self) -> bytes | None:
        with self._lock:
            while not self._ready and not self._over:
                self._hear(0)
            return self._ready.popleft() if self._ready else None

    def send(self, message: bytes) -> None:
        with self._lock:
            self._sock.sendall(frame(TEXT, message))

    def attend(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            while not self._over and len(self._ready) < AHEAD and select.select([self._sock], [], [], 0)[0]:
                self._hear(socket.MSG_DONTWAIT)
        finally:
            self._lock.release()

    def _hear(self, flags: int) -> None:
        try:
            data = self._sock.recv(PIECE, flags)
            if not data:
                self._over = True
            for opcode, payload in self._frames.feed(data):
                self._take(opcode, payload)
        except BrokenSocketError as error:
            self._end(closing(error.code, str(error)))
        except BlockingIOError:
            return
        except OSError:
            self._over = True

    def _take(self, opcode: int, payload: bytes) -> None:
        if self._over or opcode == PONG:
            return
        if opcode == TEXT:
            self._ready.append(payload)
        elif opcode == PING:
            self._sock.sendall(frame(PONG, payload))
        elif opcode == CLOSE:
            self._end(frame(CLOSE, payload[:2]))
        else:
            self._end(closing(NOT_ACCEPTED, "messages are JSON in text frames"))

    def _end(self, last: bytes) -> None:
        self._over = True
        with contextlib.suppress(OSError):  # a client that has gone wants no goodbye
            self._sock.sendall(last)

    def close(self) -> None:
        with self._lock:
            if not self._over:
                self._end(closing(NORMAL))
            with contextlib.suppress(OSError):  # the client went first
                # The host has a descriptor of this connection too: closing ours would end nothing.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
