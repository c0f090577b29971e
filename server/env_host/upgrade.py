"""From an HTTP request for `/ws` to a session: checks the handshake, answers it, and hands the connection itself to the environment's
process. After that no byte of it passes through the host, which keeps a descriptor to have the last word.

Waits for nothing; a task of the desk does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from palestra.server.env_host import wire
from palestra.server.env_host.desk import EnvDesk
from palestra.server.env_host.guard import Guard
from palestra.server.env_host.types import SESSION_ERROR, EnvRefusal
from palestra.server.env_host.websocket import FAULT, TEXT, accepted, closing, frame

logger = logging.getLogger(__name__)

KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""A client whose machine is gone is noticed after two minutes."""


def upgrade_to(desk: EnvDesk, guard: Guard) -> type[asyncio.Protocol]:
    """The protocol that uvicorn gives a connection to which asks for a WebSocket."""

    class Bound(Upgrade):
        _desk, _guard = desk, guard

    return Bound


class Upgrade(asyncio.Protocol):
    """One handshake."""

    _desk: EnvDesk
    _guard: Guard
    _tasks: set[asyncio.Task[None]] = set()  # noqa: RUF012 - of all connections: nobody else holds them

    def __init__(self, config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> None:
        """Called by uvicorn."""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by uvicorn."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """The request's head, which uvicorn has read and written anew."""
        transport = self._transport
        assert transport is not None, "uvicorn connects first"
        first, *lines = data.split(b"\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines) if value}
        url = urlsplit(first.split(b" ")[1].decode("latin-1"))
        try:
            self._guard.check(headers)
            key = _key(url.path, headers)
        except EnvRefusal as refusal:
            transport.write(_refused(refusal))
            transport.close()
            return
        sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        transport.pause_reading()
        transport.abort()  # closes uvicorn's descriptor; the connection lives on in ours
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        attach = parse_qs(url.query).get("session_id")
        task = asyncio.get_running_loop().create_task(self._hand_over(sock, key, attach is not None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, sock: socket.socket, key: bytes, attach: bool) -> None:
        try:
            # A fresh connection takes so few bytes at once.
            sock.send(accepted(key), socket.MSG_DONTWAIT)
            if attach:
                raise EnvRefusal("a WebSocket has a session of its own: leave session_id out", 422, SESSION_ERROR)
            await self._desk.adopt(sock, websocket=True)
        except EnvRefusal as refusal:
            self._give_up(sock, frame(TEXT, wire.write_json(wire.failed(refusal))) + closing(FAULT, str(refusal)))
        except OSError as error:
            logger.info("a client went during its handshake: %s", error)
            sock.close()

    @staticmethod
    def _give_up(sock: socket.socket, last: bytes) -> None:
        with sock:
            try:
                sock.send(last, socket.MSG_DONTWAIT)
                sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                logger.info("a client that found no room has gone: %s", error)


def _key(path: str, headers: dict[bytes, bytes]) -> bytes:
    """The key of a proper handshake.

    Raises:
        EnvRefusal: it is none.
    """
    if path != "/ws":
        raise EnvRefusal(f"there is no WebSocket at {path[:100]}; sessions are at /ws", 404, SESSION_ERROR)
    if headers.get(b"sec-websocket-version") != b"13" or len(headers.get(b"sec-websocket-key", b"")) != 24:
        raise EnvRefusal("a WebSocket handshake of version 13 is wanted, with a key", 400, SESSION_ERROR)
    return headers[b"sec-websocket-key"]


def _refused(refusal: EnvRefusal) -> bytes:
    body = wire.write_json({"error": refusal.data})
    head = f"HTTP/1.1 {refusal.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body
