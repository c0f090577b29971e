"""The model calls of an evaluation: counted, and sent again where the server was only busy.

Usage objects and times of calls go into a `Meter`, a `Usage` per episode comes out. `PatientPolicy` waits between repetitions, at most as
long as the episode has left.
"""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.agents.chat import ModelStatusError
from palestra.agents.evaluation.types import Usage
from palestra.agents.types import Policy, PolicyReply
from palestra.envs.types import Message, ToolSpec

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers after which the same call can do better."""
RETRIES = 8
"""Of one call."""
LONGEST_WAIT_S = 60.0


@dataclass(slots=True)
class _Count:
    calls: int = 0
    told: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    retries: int = 0
    seconds: list[float] = field(default_factory=list)


class Meter:
    """Counts the calls of every episode by its rollout id. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._lock = threading.Lock()

    def usage(self, rollout_id: str, said: Mapping[str, Any]) -> None:
        """Takes in the `usage` object of a reply; {} where it had none."""
        prompt, completion = _count(said.get("prompt_tokens")), _count(said.get("completion_tokens"))
        details = said.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        with self._lock:
            count = self._counts.setdefault(rollout_id, _Count())
            count.calls += 1
            count.told += prompt is not None and completion is not None
            count.prompt += prompt or 0
            count.completion += completion or 0
            count.cached += cached or 0

    def took(self, rollout_id: str, seconds: float) -> None:
        """Takes in the wall time of an answered call."""
        with self._lock:
            self._counts.setdefault(rollout_id, _Count()).seconds.append(round(seconds, 4))

    def retried(self, rollout_id: str) -> None:
        """A call is sent again."""
        with self._lock:
            self._counts.setdefault(rollout_id, _Count()).retries += 1

    def take(self, rollout_id: str) -> Usage:
        """The sums of an episode, which is forgotten then."""
        with self._lock:
            count = self._counts.pop(rollout_id, _Count())
        return Usage(
            count.calls, count.told, count.prompt, count.completion, count.cached, tuple(count.seconds), count.retries
        )


def _count(value: Any) -> int | None:
    """A number of tokens as a server tells it; whatever else it may say is no number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def wait_s(attempt: int, retry_after: str | None) -> float:
    """Seconds before repetition number `attempt` (from 0): what the server asked for, or twice as long as before from half a second on;
    never longer than LONGEST_WAIT_S.
    """
    asked = _seconds(retry_after)
    return min(0.5 * 2.0**attempt if asked is None else asked, LONGEST_WAIT_S)


def _seconds(retry_after: str | None) -> float | None:
    """The header in either of its forms: seconds, or a date."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        date = email.utils.parsedate_tz(retry_after)
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())


class PatientPolicy:
    """A policy whose calls are timed, and sent again while the server is busy."""

    def __init__(self, policy: Policy, meter: Meter, rollout_id: str, stopping: threading.Event) -> None:
        """`stopping`: set when nobody waits for the episode any more."""
        self._policy, self._meter, self._rollout_id, self._stopping = policy, meter, rollout_id, stopping

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        """See `Policy.act`. A server that is busy until the deadline is a fault of its own: the episode has no reward."""
        deadline, attempt = time.monotonic() + timeout_s, 0
        while True:
            began = time.monotonic()
            try:
                reply = self._policy.act(messages, tools, max(0.001, deadline - began))
            except ModelStatusError as error:
                wait = wait_s(attempt, error.retry_after)
                late = time.monotonic() + wait >= deadline
                if error.status not in BUSY or attempt >= RETRIES or late or self._stopping.is_set():
                    raise
                self._meter.retried(self._rollout_id)
                self._stopping.wait(wait)
                attempt += 1
            else:
                self._meter.took(self._rollout_id, time.monotonic() - began)
                return reply
