"""Words of the buffer: token counts of a rollout, a group as the database knows it, what a restore did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palestra.server.types import GroupState, ServerError


class VersionRefused(ServerError):
    """A policy version was published that is not above every earlier one. Versions are never used twice."""


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """The sampled tokens of one rollout's rows, each counted once."""

    rollout_id: str
    attempt: int
    reward: float | None
    trained: int
    """Tokens with mask 1."""
    masked: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens with mask 0, by the name of their source; SHARED ones are left out, since another row has them."""


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """One group as the buffer's database knows it."""

    group_id: str
    task_id: str
    group_size: int
    state: GroupState
    reason: str | None
    """Why it was dropped."""
    step: int | None
    """The train step that it was committed in."""
    checkpoint_id: str | None
    owner: str | None
    """Who claimed or committed it."""
    versions: tuple[int, ...]
    """Policy versions of its sampled tokens, ascending."""
    rollouts: tuple[RolloutCounts, ...]


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `restore` did."""

    readied: tuple[str, ...]
    """Groups that are ready again."""
    abandoned: tuple[str, ...]
    """Groups dropped since they hold tokens of weights that the restored run never had."""
    next_version: int
    """The first policy version that was never published."""
