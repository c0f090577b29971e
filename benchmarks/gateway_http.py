"""The least HTTP/1.1 that a load generator and a mock engine need: both must cost far less than what they measure.

In: bytes. Out: bytes; bodies with a content length only, connections kept alive. `Connection.request` waits for its answer, at most as long
as it is told; the server side waits for nothing.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

Handler = Callable[[bytes, bytes, Callable[[bytes], None]], None]
"""(path, body, send): answers a request by calling `send` with a whole response, at once or later."""


class Broken(Exception):
    """A connection ended, or said something that is no answer."""


def raise_file_limit() -> None:
    """Two thousand connections need more descriptors than a shell allows by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole JSON response."""
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def _length(head: bytes) -> int:
    at = head.find(b"content-length:")
    return 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])


class Connection(asyncio.Protocol):
    """One kept-alive connection of a client, with one request at a time."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._need = 0
        self._start = 0
        self._status = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def to(cls, url: str) -> Connection:
        """Connects.

        Raises:
            OSError: nobody listens there.
        """
        where = urlsplit(url)
        host, port = where.hostname or "127.0.0.1", where.port or 80
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    async def request(
        self, method: bytes, path: bytes, headers: bytes, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of the answer. `headers`: lines that each end with CRLF.

        Raises:
            Broken: the connection ended first.
            TimeoutError: no answer within `timeout_s`.
        """
        if self._transport is None or self._transport.is_closing():
            raise Broken("the connection is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._answer = answer
        head = b"%s %s HTTP/1.1\r\nhost: 127.0.0.1\r\n%scontent-length: %d\r\n\r\n" % (method, path, headers, len(body))
        self._transport.write(head + body)
        timer = loop.call_later(timeout_s, self._late, answer)
        try:
            return await answer
        finally:
            timer.cancel()

    @staticmethod
    def _late(answer: asyncio.Future[tuple[int, bytes]]) -> None:
        if not answer.done():
            answer.set_exception(TimeoutError("no answer in time"))

    def close(self) -> None:
        """Ends the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._held += data
        if not self._need:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._held[:end]).lower()
            self._status, self._start, self._need = int(head[9:12]), end + 4, end + 4 + _length(head)
        if len(self._held) >= self._need and self._answer is not None and not self._answer.done():
            body = bytes(self._held[self._start : self._need])
            del self._held[: self._need]
            self._need = 0
            self._answer.set_result((self._status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Broken(f"the connection ended: {exc}"))


class Listener(asyncio.Protocol):
    """One connection of a server."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._held = bytearray()
        self._need = 0
        self._start = 0
        self._path = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._held += data
        while True:
            if not self._need:
                end = self._held.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self._held[:end])
                self._path, self._start = head.split(b" ", 2)[1], end + 4
                self._need = end + 4 + _length(head.lower())
            if len(self._held) < self._need:
                return
            body = bytes(self._held[self._start : self._need])
            del self._held[: self._need]
            self._need = 0
            self._handler(self._path, body, self._send)

    def _send(self, raw: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(raw)


async def listen(handler: Handler, port: int = 0) -> tuple[asyncio.Server, str]:
    """A server on loopback and its URL; port 0 takes a free one."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Listener(handler), "127.0.0.1", port, backlog=4096)
    host, taken = server.sockets[0].getsockname()[:2]
    return server, f"http://{host}:{taken}"
