"""The world of `benchmarks/schedule.py`: how long replies are, how fast simulated engines sample them, and how long a step trains.

Pure arithmetic in virtual seconds; nothing is waited for. What the figures stand on is said in docs/schedules.md.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

MEDIAN, TAIL, CAP = 256, 10.0, 4096
"""Tokens of the median reply, the 99th percentile over it, and `max_response`."""
SIGMA = math.log(TAIL) / 2.3263478740408408
"""Of the lognormal distribution with that ratio: 2.326 is the 99th percentile of the standard normal one."""
STEP_S, PER_REQUEST_S = 4.52e-3, 0.180e-3
"""A decode step of one engine: reading the weights, and the cache of each request."""


class Replies:
    """Lengths and rewards of rollouts. The same rollout of the same group always has the same, whatever the schedule does."""

    def __init__(self, seed: int, group_size: int, equal: float = 0.0) -> None:
        """`equal`: share of groups whose rewards are all the same."""
        self._seed, self._size, self._equal = seed, group_size, equal

    def group(self, number: int) -> tuple[list[int], list[float]]:
        """Tokens and reward of each rollout of group `number`."""
        draw = np.random.default_rng([self._seed, number])
        lengths = np.clip(np.rint(MEDIAN * np.exp(SIGMA * draw.standard_normal(self._size))), 1, CAP)
        alike = draw.random() < self._equal
        rewards = [1.0 if alike else float(index % 2) for index in range(self._size)]
        return [int(length) for length in lengths], rewards


@dataclass(slots=True)
class Request:
    """One rollout on its way through an engine."""

    name: str
    group_id: str
    index: int
    attempt: int
    tokens: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled in all when other weights came)."""
    begun_at: float = 0.0
    """The engine's progress when it got its slot, in tokens."""


class Engine:
    """Samples for at most `slots` requests at a time, all equally fast; the others queue, oldest first.

    Progress is counted in tokens per request: every running request gains the same, so that the next one to end is on top of a heap.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.frozen = False
        self.busy_s = 0.0
        """Slot-seconds that sampled."""
        self._progress = 0.0
        self._at = 0.0
        self._running: list[tuple[float, str, Request]] = []
        self._queue: deque[Request] = deque()

    @property
    def load(self) -> int:
        """Requests here."""
        return len(self._running) + len(self._queue)

    @property
    def busy(self) -> int:
        """Slots that sample."""
        return 0 if self.frozen else len(self._running)

    def running(self) -> Iterator[Request]:
        """Requests that have a slot."""
        return (request for _, _, request in self._running)

    def advance(self, now: float) -> float:
        """Samples until `now`; returns the tokens."""
        passed, self._at = now - self._at, now
        if self.frozen or not self._running:
            return 0.0
        gained = passed / self._token_s()
        self._progress += gained
        self.busy_s += passed * len(self._running)
        return gained * len(self._running)

    def submit(self, request: Request) -> None:
        """A request comes; `advance` was called for now."""
        self._queue.append(request)
        self._fill()

    def next_end(self) -> float:
        """When the next request ends, as things stand; infinite where none will."""
        if self.frozen or not self._running:
            return math.inf
        return self._at + max(0.0, self._running[0][0] - self._progress) * self._token_s()

    def take_ended(self) -> Request:
        """The request that ends now; `advance` was called for now."""
        request = heapq.heappop(self._running)[2]
        self._fill()
        return request

    def change(self, version: int) -> None:
        """Other weights: what runs has sampled so far with `version`."""
        for request in self.running():
            sampled = min(request.tokens, math.floor(self._progress - request.begun_at + 1e-6))
            if sampled > (request.spans[-1][1] if request.spans else 0):
                request.spans.append((version, sampled))

    def _token_s(self) -> float:
        return STEP_S + PER_REQUEST_S * len(self._running)

    def _fill(self) -> None:
        while self._queue and len(self._running) < self.slots:
            request = self._queue.popleft()
            request.begun_at = self._progress
            heapq.heappush(self._running, (self._progress + request.tokens, request.name, request))
