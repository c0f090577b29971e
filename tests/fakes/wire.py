"""A cable between a client and a server on loopback, for faults that no server plays well itself: connections that break in the middle of a
reply, a process that is gone, and one that was stopped, whose connections stay open and say nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Wire:
    """Forwards bytes to `target`. All methods are of its own loop."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._port = 0
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._pairs: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients reach it; the same over all faults."""
        return f"http://127.0.0.1:{self._port}"

    async def plug(self) -> None:
        """From now on connections are accepted."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """As if the process had been killed: open connections are reset, new ones refused."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._pairs):
            reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flows.set()

    def freeze(self) -> None:
        """As if the process had been stopped: connections are made, and nothing comes back."""
        self._flows.clear()

    def thaw(self) -> None:
        """What was held up goes on."""
        self._flows.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._pairs.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            back, other = await asyncio.open_connection(*self._target)
            self._pairs.add(other)
            ways = [asyncio.create_task(self._carry(reader, other)), asyncio.create_task(self._carry(back, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for end in (writer, other):
                if end is not None:
                    self._pairs.discard(end)
                    end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as the kernel does for a process that was killed with data unread."""
    if not writer.transport.is_closing():
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


@asynccontextmanager
async def wired(target: str) -> AsyncIterator[Wire]:
    """A wire to `target` while the context is open."""
    wire = Wire(target)
    await wire.plug()
    try:
        yield wire
    finally:
        await wire.cut()
