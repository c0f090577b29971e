"""Words of the turn log: what is written when a session opens and ends, and what is read back.

Flows: `SessionRecord` and `GroupRecord` go in when rollouts are planned, a `SessionOutcome` when one ends;
`StoredSession` and `StoredEvent` come out, of a live run or of the files that a finished or killed one left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from palestra.envs.types import Episode
from palestra.server.types import GroupState


class SessionState(StrEnum):
    """Life of a session: open, then closed with an outcome or discarded with a reason."""

    OPEN = "open"
    CLOSED = "closed"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session as it is opened. `(rollout_id, attempt)` is its key."""

    rollout_id: str
    attempt: int
    group_id: str
    task_id: str
    index: int
    """Which rollout of the group, from 0."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the opener needs to find the session again after a restart; stored as JSON and never interpreted here."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """How a session ended."""

    reward: float | None
    """None where a fault left it unknown; a number that is not finite is stored as None."""
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()
    stop_reason: str = ""
    truncated: bool = False
    terminated: bool = False
    error: str | None = None
    episode: Mapping[str, Any] | None = None
    """The whole episode as JSON, for the reader."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group as it was planned."""

    group_id: str
    task: Any
    """The task, or its index in the environment's own tasks; anything that JSON can hold."""
    seed: int
    size: int
    attempt: int = 0
    state: GroupState = GroupState.OPEN


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One session as the log knows it."""

    record: SessionRecord
    state: SessionState
    opened_at: float
    """Unix seconds."""
    ended_at: float | None
    """Unix seconds; None while it is open."""
    discard_reason: str | None
    outcome: SessionOutcome | None
    """None unless it was closed."""
    turns: int
    sampled_tokens: int
    """Completion tokens of all its turns, delivered or not."""
    undelivered_tokens: int
    """The part of sampled_tokens whose reply never reached the caller."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Something that happened in a session and is no turn: a fork, a retry."""

    rollout_id: str
    attempt: int
    kind: str
    at: float
    """Unix seconds."""
    data: Mapping[str, Any]


def outcome_of(episode: Episode) -> SessionOutcome:
    """The outcome that a played episode gives its session."""
    whole = {name: getattr(episode, name) for name in Episode.__slots__}
    return SessionOutcome(
        reward=episode.reward.value,
        components=episode.reward.components,
        turn_rewards=episode.step_rewards,
        stop_reason=str(episode.stop_reason),
        truncated=episode.truncated,
        terminated=episode.terminated,
        error=episode.error,
        episode=whole,
    )
