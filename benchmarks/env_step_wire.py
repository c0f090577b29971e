"""The load: clients that speak WebSockets to a server, ours or OpenEnv's, each over a connection that it keeps.

In: a URL and how many clients. Out: latencies, and CPU time of the server's processes. The client is the same for both, offers no
compression, and costs little; every answer is checked. It waits for every answer, at most ANSWER_S.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import orjson

ANSWER_S = 60.0
EPISODE = 20
"""Steps of an episode; the reset after them counts as CPU time, not as a step."""
PING = 9
_HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a round."""

    steps: int
    p50_us: float
    """Median latency of a step."""
    cpu_us: float
    """Of all processes of the server, per step."""


class Client(asyncio.Protocol):
    """One session."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._open = False
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def to(cls, url: str) -> Client:
        """Connects, and begins an episode."""
        where = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(cls, where.hostname, where.port)
        async with asyncio.timeout(ANSWER_S):
            await client._expect(_HANDSHAKE)
            client._open = True
            await client.ask({"type": "reset", "data": {"seed": 1}})
        return client

    async def ask(self, message: dict[str, object]) -> bytes:
        """One message and its answer."""
        data = orjson.dumps(message)
        # A mask of zeros is a mask, and costs the client nothing.
        head = (
            struct.pack(">BB", 0x81, 0x80 | len(data))
            if len(data) < 126
            else struct.pack(">BBH", 0x81, 0xFE, len(data))
        )
        return await self._expect(head + bytes(4) + data)

    def _expect(self, data: bytes) -> asyncio.Future[bytes]:
        assert self._transport is not None, "connected first"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer

    async def step(self, text: str) -> float:
        """Seconds that a step took.

        Raises:
            RuntimeError: the answer is not the echo.
        """
        began = time.perf_counter()
        answer = await self.ask({"type": "step", "data": {"message": text}})
        seconds = time.perf_counter() - began
        seen = orjson.loads(answer)["data"]["observation"]
        if (seen.get("text") or seen.get("echoed_message")) != text:
            raise RuntimeError(f"not the echo: {answer[:300]!r}")
        return seconds

    def close(self) -> None:
        """Ends the session."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._held += data
        if not self._open:
            if (end := self._held.find(b"\r\n\r\n")) >= 0:
                self._take(end + 4, 0)
            return
        while len(self._held) >= 2:
            size, start = self._held[1] & 0x7F, 2
            if size == 126:
                size, start = int.from_bytes(self._held[2:4], "big"), 4
            if len(self._held) < start + size:
                return
            if self._held[0] & 15 == PING:
                self._pong(bytes(self._held[start : start + size]))
                del self._held[: start + size]
            else:
                self._take(start + size, start)

    def _pong(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(bytes((0x8A, 0x80 | len(payload))) + bytes(4) + payload)

    def _take(self, end: int, start: int) -> None:
        found = bytes(self._held[start:end])
        del self._held[:end]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the server hung up: {exc}"))


async def load(clients: list[Client], pid: int, for_s: float) -> Load:
    """All clients step for a while, each as soon as it has its answer. `pid`: the server's first process."""
    latencies: list[float] = []
    before, until = cpu_s(pid), time.perf_counter() + for_s

    async def play(client: Client, number: int) -> None:
        turn = 0
        while time.perf_counter() < until:
            latencies.append(await client.step(f"client {number} says at turn {turn} what small models say"))
            turn += 1
            if turn % EPISODE == 0:
                await client.ask({"type": "reset", "data": {"seed": turn}})

    async with asyncio.timeout(for_s + ANSWER_S):
        await asyncio.gather(*(play(client, number) for number, client in enumerate(clients)))
    cpu = cpu_s(pid) - before
    latencies.sort()
    return Load(len(latencies), 1e6 * latencies[len(latencies) // 2], 1e6 * cpu / len(latencies))


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of a process, its threads and all that it started, as the scheduler counts them."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
        total += sum(cpu_s(int(child)) for child in (task / "children").read_text().split())
    return total
