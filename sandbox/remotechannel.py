"""The way to the agent of a box that is on another machine: one HTTP request a call.

In: requests of an `AgentBox`. Out: the agent's replies as the host passed them on. A call whose connection broke is sent again under its
own number, and the host answers with what came of the first one. Waits for the host.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from palestra.sandbox.hosts import CONTROL_S, Answer, HostUnreachableError, SandboxHost
from palestra.sandbox.inside.frames import FrameError, pack
from palestra.sandbox.types import BoxLostError, BoxProtocolError
from palestra.sandbox.wire import POLL_S, STATE, read_frame

DELAYS_S = (0.02, 1.0)
"""First and longest pause before a broken call is sent again."""
REFUSED = frozenset((400, 413, 415))
"""Statuses that say that the request was wrong; the box lives."""


class HttpChannel:
    """`channel.Channel` of a box on a host."""

    def __init__(self, host: SandboxHost, name: str, lost_s: float) -> None:
        """`lost_s`: how long the host may be away before the box counts as lost, seconds."""
        self.host, self.name = host, name
        self._lost_s = lost_s
        self._numbers = itertools.count(1)
        self._error: BoxLostError | BoxProtocolError | None = None

    @property
    def alive(self) -> bool:
        """Whether nothing is known against the box."""
        return self._error is None

    async def call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """See `channel.Channel`; it never raises TimeoutError: the host, which sees the box, says what ran out of time."""
        if self._error is not None:
            raise self._error
        whole, number = pack(request), next(self._numbers)
        now = asyncio.get_running_loop().time
        until, away_since, broken = now() + timeout + CONTROL_S, None, 0
        body = whole
        while self._error is None:
            try:
                answer = await self.host.ask(self.name, body, number, timeout, POLL_S + CONTROL_S)
            except HostUnreachableError as error:
                away_since = away_since or now()
                if now() - away_since >= self._lost_s:
                    raise self.lose(f"{error}, for {self._lost_s:g} s; its boxes are given up") from None
                await asyncio.sleep(min(DELAYS_S[0] * 2 ** min(broken, 10), DELAYS_S[1]))
                body, broken = whole, broken + 1
                continue
            if answer.status != 202:
                return self._read(answer)
            away_since, broken, body = None, 0, b""
            if answer.headers.get(STATE) == "waiting":
                until = now() + timeout + CONTROL_S
            if now() > until:
                raise self.lose(f"{self.host.url} did not end a request within {timeout:g} s")
        raise self._error

    def _read(self, answer: Answer) -> dict[str, Any]:
        if answer.status == 200:
            if answer.headers.get(STATE) == "lost":
                self.lose("the host destroyed the box with its last answer")
            try:
                return read_frame(answer.body)
            except FrameError as error:
                raise self.lose(f"{self.host.url} answered nonsense: {error}") from None
        code, said = answer.reason
        if answer.status in REFUSED:
            raise ValueError(f"{self.host.url}: {said}")
        if code == "protocol":
            self._error = BoxProtocolError(said)
            raise self._error
        raise self.lose(f"{self.host.url}: {said}")

    def lose(self, why: str) -> BoxLostError:
        """The box is gone: nothing more is sent to it. Returns the error that says so."""
        error = BoxLostError(why)
        if self._error is None:
            self._error = error
        return error

    async def close(self) -> None:
        """Nothing more is sent; the box itself is its backend's to end."""
        self.lose("the box was closed")
