"""How busy the engines are: integrals over time of how many requests they have.

In: each change of that number. Out: seconds in which there was one at all, and request-seconds. Pure but for the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """A reading, or the difference of two."""

    seconds: float
    """Since the start."""
    busy_s: float
    """In which engines had at least one request."""
    load_s: float
    """Requests times the seconds for which engines had them, no more counted at a time than there are places."""

    def since(self, before: Busy) -> Busy:
        """What happened after an earlier reading."""
        return Busy(self.seconds - before.seconds, self.busy_s - before.busy_s, self.load_s - before.load_s)

    @property
    def share(self) -> float:
        """Of the time, in which engines had something to do."""
        return self.busy_s / self.seconds if self.seconds > 0 else 0.0

    def idle_share(self, places: int) -> float:
        """Of places times time, in which a place had no request."""
        whole = places * self.seconds
        return 1 - self.load_s / whole if whole > 0 else 0.0


class BusyClock:
    """Adds up."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`places`: requests that the engines together take at a time."""
        self.places, self._clock = places, clock
        self._now = 0
        self._began = self._at = clock()
        self._busy_s = self._load_s = 0.0

    @property
    def now(self) -> int:
        """Requests that engines have."""
        return self._now

    def change(self, by: int) -> None:
        """Requests came (above 0) or went."""
        self._add()
        self._now += by

    def read(self) -> Busy:
        """The sums so far."""
        self._add()
        return Busy(self._at - self._began, self._busy_s, self._load_s)

    def _add(self) -> None:
        at = self._clock()
        if self._now:
            self._busy_s += at - self._at
            self._load_s += min(self._now, self.places) * (at - self._at)
        self._at = at
