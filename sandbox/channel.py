"""Requests to a box's agent and its replies, over a stream that comes from untrusted ground.

In: requests (dicts, see `inside.agent`), each with a deadline. Out: replies, or an error that says whose doing it was. What does not parse,
is too long or answers nothing that was asked makes the channel dead: nothing more is believed. Waits for the agent.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.sandbox.inside.frames import FrameError, Inbox, pack
from palestra.sandbox.types import BoxLostError, BoxProtocolError

RUNS = frozenset(("exec", "python", "cell"))
"""Requests that run code."""


class Channel(Protocol):
    """A way to a box's agent."""

    @property
    def alive(self) -> bool: ...

    async def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends a request and waits for its reply, at most `timeout` seconds.

        Raises:
            TimeoutError: no reply; the channel lives, the request may still run.
            BoxLostError: the box is gone.
            BoxProtocolError: the other end talks nonsense.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """What a box's cgroup counted since the box began."""

    oom_kills: int = 0
    refused_pids: int = 0
    peak_bytes: int | None = None


class StreamChannel(asyncio.Protocol):
    """A channel over a connected socket (or, by `transport`, anything that calls `data_received`)."""

    def __init__(self, counts: Callable[[], Counts] | None = None) -> None:
        """`counts` looks at the box's cgroup; None where nobody out here can."""
        self._counts = counts
        self._before = Counts()
        self._inbox = Inbox()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._error: Exception | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def over(cls, sock: socket.socket, counts: Callable[[], Counts] | None = None) -> StreamChannel:
        """A channel over this socket, which it owns from here on."""
        sock.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(counts), sock=sock)
        return channel

    @property
    def alive(self) -> bool:
        return self._error is None

    def write(self, data: bytes) -> None:
        """Bytes ahead of the first frame."""
        if self._transport is not None:
            self._transport.write(data)

    async def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        data = pack({**request, "id": number})
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        runs = self._counts is not None and request.get("op") in RUNS
        if runs:
            self._before = self._look()
        self.write(data)
        try:
            async with asyncio.timeout(timeout):
                reply: dict[str, Any] = await future
        finally:
            self._waiting.pop(number, None)
        return self._witnessed(reply) if runs else reply

    def last_counts(self) -> Counts:
        """What the cgroup counted since the last run began; for one that was never answered."""
        now = self._look()
        before = self._before
        return Counts(now.oom_kills - before.oom_kills, now.refused_pids - before.refused_pids, now.peak_bytes)

    def _look(self) -> Counts:
        return Counts() if self._counts is None else self._counts()

    def _witnessed(self, reply: dict[str, Any]) -> dict[str, Any]:
        # The kernel's word out here counts, not what the box says of itself.
        counts = self.last_counts()
        return {**reply, "oom": counts.oom_kills, "pids": counts.refused_pids, "peak": counts.peak_bytes}

    async def close(self) -> None:
        # What was not sent yet is of no use any more, and a box that does not read would hold an orderly close for ever.
        self._fail(BoxLostError("the box was closed"))
        if self._transport is not None:
            self._transport.abort()
            await self._closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._inbox.feed(data)
        except FrameError as error:
            self._reject(str(error))
            return
        for reply in replies:
            future = self._waiting.get(reply.get("id", 0)) if isinstance(reply.get("id"), int) else None
            if future is None:
                self._reject(f"an answer to nothing that was asked ({str(reply.get('id'))[:40]})")
                return
            if not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(BoxLostError(f"the box went away{f': {exc}' if exc else ''}"))
        if not self._closed.done():
            self._closed.set_result(None)

    def _reject(self, why: str) -> None:
        self._fail(BoxProtocolError(f"the box's agent sent {why}"))
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error)
        self._waiting.clear()
