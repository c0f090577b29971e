"""When a request is made again, and when it is given up. Retries are owned here, where the sampled tokens are known; the router's are off.

In: what came instead of an answer. Out: how long to wait before the next attempt, or an error that says why there is none. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from palestra.server.types import EngineError, EngineRefused

BUSY = frozenset({408, 425, 429, 503})
"""Statuses of somebody who is there and has no room: another worker would not help."""
FIRST_S = 0.1
MOST_S = 5.0
MOST_ASKED_S = 30.0
"""A Retry-After is honoured up to so much."""


class EngineBusy(EngineError):
    """The engines are there and had no room for the request, for as long as it could wait."""


class EngineLost(EngineError):
    """No engine could be reached for the request, for as long as it could wait."""


class Setback(EngineError):
    """One attempt that failed through no fault of the request."""

    def __init__(self, message: str, *, broken: bool, asked_s: float = 0.0) -> None:
        """`broken`: the worker may be dead, and another one may not; `asked_s`: what its Retry-After says, seconds."""
        super().__init__(message)
        self.broken, self.asked_s = broken, asked_s


def failure(url: str, status: int, retry_after: str | None, raw: bytes) -> EngineRefused | Setback:
    """What a status other than 200 means."""
    said = f"{url}: HTTP {status}: {raw[:500].decode(errors='replace')}"
    if status in BUSY:
        return Setback(said, broken=False, asked_s=_seconds(retry_after))
    if 400 <= status < 500:
        return EngineRefused(said)
    return Setback(said, broken=True)


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(float(retry_after or 0.0), 0.0), MOST_ASKED_S)
    except ValueError:  # a date: our own back-off does as well
        return 0.0


class BackOff:
    """The attempts of one part of a request since its last success."""

    def __init__(self, retry_s: float, draw: Callable[[], float] = random.random) -> None:
        """`retry_s`: how long attempts may fail in a row; `draw` gives 0 to 1."""
        self._retry_s, self._draw = retry_s, draw
        self._delay, self._since, self._attempts = FIRST_S, 0.0, 0

    def next_delay(self, setback: Setback, now: float, deadline: float) -> float:
        """Seconds before the next attempt. The first one after a broken connection is made at once: its worker is out of routing by then.

        Raises:
            EngineBusy: there was no room for too long.
            EngineLost: there was nobody for too long.
        """
        self._attempts += 1
        if self._attempts == 1:
            self._since = now
            if setback.broken and now < deadline:
                return 0.0
        delay = max(self._delay * (0.5 + self._draw()), setback.asked_s)
        self._delay = min(self._delay * 2, MOST_S)
        if now - self._since > self._retry_s or now + delay > deadline:
            raise given_up(setback, now - self._since)
        return delay


def given_up(setback: Setback, seconds: float) -> EngineBusy | EngineLost:
    """The error after the last attempt."""
    if setback.broken:
        return EngineLost(f"the engines did not answer for {seconds:.0f} s; last: {setback}")
    return EngineBusy(f"the engines had no room for {seconds:.0f} s; last: {setback}")
