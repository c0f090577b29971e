"""The way to an agent in a container: the engine's attach call, upgraded to a plain stream, on this loop.

In: the engine's address and a container that is not started. Out: a channel; a container's stdout is told from its stderr by the engine's
frame heads. No thread, no polling. Waits for the engine.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from palestra.sandbox.channel import Counts, StreamChannel
from palestra.sandbox.types import SandboxError, SandboxUnavailableError

MOST_HEAD = 16 * 1024
"""Bytes of an answer's head, or of the text of a refusal."""
MOST_STDERR = 4000
"""Last bytes that are kept of what the agent says to stderr: why it did not start."""
STDOUT, STDERR = 1, 2
HEAD = 8
"""Bytes in front of each piece: which stream, three zeros, how long."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens."""

    path: str = ""
    """Of a unix socket; empty for TCP."""
    host: str = ""
    port: int = 0
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str, tls: Any = None) -> Endpoint:
        """From the SDK's form of an address and its TLS settings.

        Raises:
            SandboxUnavailableError: an address of a kind that cannot be attached to.
        """
        parts = urlsplit(url)
        if parts.scheme in ("unix", "http+unix"):
            return cls(path="/" + (parts.netloc + parts.path).lstrip("/"))
        if parts.scheme in ("tcp", "http", "https") and parts.hostname:
            secured = tls is not None or parts.scheme == "https"
            return cls(
                "", parts.hostname, parts.port or (2376 if secured else 2375), _context(tls) if secured else None
            )
        raise SandboxUnavailableError(
            f"the docker backend cannot attach to {url!r}: give unix:///path or tcp://host:port (for ssh, forward the socket: "
            "ssh -L /tmp/docker.sock:/var/run/docker.sock HOST)"
        )

    async def connect(self, channel: Callable[[], AttachedChannel]) -> AttachedChannel:
        """A connected channel.

        Raises:
            SandboxUnavailableError: nobody listens there.
        """
        loop = asyncio.get_running_loop()
        try:
            if self.path:
                return (await loop.create_unix_connection(channel, self.path))[1]
            transport, made = await loop.create_connection(channel, self.host, self.port, ssl=self.tls)
        except OSError as error:
            raise SandboxUnavailableError(f"no way to the container engine: {error}") from error
        # A host that vanished must be noticed although nothing is sent.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return made


def _context(tls: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=getattr(tls, "ca_cert", None))
    if tls is not None and not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls is not None and tls.cert:
        context.load_cert_chain(*tls.cert)
    return context


class AttachedChannel(StreamChannel):
    """A `StreamChannel` inside an attach stream."""

    def __init__(self, container: str, version: str) -> None:
        super().__init__()
        self._request = (
            f"POST /v{version}/containers/{quote(container)}/attach?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        ).encode()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = False
        self._head = bytearray()
        self._kind, self._left = STDOUT, 0
        self._stderr = bytearray()

    def witness(self, counts: Callable[[], Counts]) -> None:
        """From here on the cgroup is looked at from out here: it exists only once the container runs."""
        self._counts = counts

    @property
    def stderr(self) -> str:
        """The end of what the agent said to stderr."""
        return self._stderr.decode("utf-8", "replace").strip()

    async def opened(self, timeout: float) -> None:
        """Waits until the stream stands.

        Raises:
            SandboxError: the engine refuses, or does not answer.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._ready
        except TimeoutError:
            raise SandboxError(f"the container engine did not attach within {timeout:g} s") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._open:
            self._head += data
            data = self._upgraded()
        at = 0
        while at < len(data) and self.alive:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                self._took(piece)
            else:
                at = self._take_head(data, at)

    def _take_head(self, data: bytes, at: int) -> int:
        part = data[at : at + HEAD - len(self._head)]
        self._head += part
        if len(self._head) == HEAD:
            self._kind, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
            if self._kind > STDERR or any(self._head[1:4]):
                self._reject("no frame of the container engine")
            self._head.clear()
        return at + len(part)

    def _took(self, piece: bytes) -> None:
        if self._kind == STDOUT:
            super().data_received(piece)
        elif self._kind == STDERR:
            self._stderr += piece
            del self._stderr[:-MOST_STDERR]

    def _upgraded(self) -> bytes:
        """Reads the answer's head once it is whole; what follows it."""
        head, end, rest = bytes(self._head).partition(b"\r\n\r\n")
        status = head[9:12]
        if end and status in (b"101", b"200"):
            self._open = True
            self._head.clear()
            if not self._ready.done():
                self._ready.set_result(None)
            return rest
        if len(self._head) > MOST_HEAD or (end and rest):
            self._refused(f"{status.decode('latin-1')} {rest[:500].decode('utf-8', 'replace').strip()}")
        return b""

    def _refused(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(SandboxError(f"the container engine does not attach: {why}"))
        self._reject("no attach stream")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ready.done():
            told = bytes(self._head[:500]).decode("utf-8", "replace").strip()
            self._ready.set_exception(SandboxError(f"the container engine hung up instead of attaching: {exc or told}"))
        super().connection_lost(exc)
