"""Words of the plan: what it follows, what it hands out, and what it knows of rollouts and groups that are under way."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from palestra.agents.types import PlayedRollout, Verdict
from palestra.server.store.types import GroupRecord, SessionOutcome, StoredEvent, StoredSession
from palestra.server.types import GroupState, Trajectory

Program: TypeAlias = Literal["none", "plan", "function"]
"""Whose word counts when a group is complete: nobody's, a `RolloutPlan`'s in a worker, or that of a function that makes the rollouts."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What of the run's configuration the plan follows."""

    groups_per_step: int
    group_size: int
    staleness: int
    """Train steps between the weights that sampled a token and those it trains."""
    last_step: int
    drop_zero_variance: bool
    retries: int
    seed: int
    shuffle: bool
    rollout_deadline_s: float
    """A rollout that no worker has ended this long after it was handed out is lost: its worker is gone."""
    ahead: int | None = None
    """Batches beyond the next one for which groups may be opened with the weights of the last publish; None: as many as `staleness` lets
    be trained."""
    oversample: float = 1.0
    """Groups that may be under way for each that the batches need."""
    max_in_flight: int | None = None
    """Rollouts that play or wait to be played at a time."""
    min_group: int = 1
    """Rollouts with a reward that a group needs."""
    max_truncated: float = 1.0
    """A group of which a larger share was cut by a limit is dropped."""
    mask_old: bool = False
    """Whether tokens beyond the bound are masked at a claim; else their groups are dropped."""
    mask_earlier: bool = False
    """Whether tokens of earlier versions than a rollout's newest are masked at a claim."""
    budget_s: float | None = None
    """Seconds that a step generates before a claim is answered with what is ready; None: it waits until enough is."""
    budget_tokens: int | None = None
    """The same in sampled tokens."""
    least: int = 1
    """Groups that such a claim waits for in any case."""
    colocated: bool = False
    """Whether engines rest while a step trains."""
    program: Program = "none"

    @property
    def partial(self) -> bool:
        """Whether a step may take less than a whole batch."""
        return self.budget_s is not None or self.budget_tokens is not None


@dataclass(slots=True)
class RolloutSlot:
    """One of a group's k rollouts."""

    index: int
    attempt: int = 0
    retries_left: int = 0
    outcome: SessionOutcome | None = None
    started_at: float | None = None
    """By the plan's clock when a worker took it; None while it waits."""


@dataclass(slots=True)
class OpenGroup:
    """One group from its opening to its last rollout's end."""

    group_id: str
    task: Any
    """Index in the environment's own tasks, or the task itself as a mapping."""
    seed: int
    slots: list[RolloutSlot]
    task_id: str = ""
    outside: bool = False
    """Opened by somebody else than the plan: nothing of it is handed out, and it counts for no schedule."""
    opened_at: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    """What was said of it before it was complete."""

    @property
    def complete(self) -> bool:
        """Every rollout has ended for good."""
        return all(slot.outcome is not None for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is told to play: some rollouts of one group, all at the same attempt."""

    group_id: str
    group_size: int
    indices: tuple[int, ...]
    attempt: int
    task: Any
    seed: int
    replay: bool = False
    """Whether these sessions are on record already: their environments are deterministic and are led through what was recorded."""

    def as_dict(self) -> dict[str, Any]:
        """For the wire."""
        return {"kind": "play", **{name: getattr(self, name) for name in self.__slots__}}


@dataclass(frozen=True, slots=True)
class Review:
    """A complete group that a worker's `RolloutPlan` is asked about."""

    group_id: str
    task: Any
    rollouts: tuple[PlayedRollout, ...]

    def as_dict(self) -> dict[str, Any]:
        """For the wire."""
        rollouts = [asdict(rollout) for rollout in self.rollouts]
        return {"kind": "review", "group_id": self.group_id, "task": self.task, "rollouts": rollouts}


Work: TypeAlias = Assignment | Review


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of the environment and the program that it has."""

    tasks: int | None
    """None: as many as are asked for."""
    weights: Sequence[float] | None = None
    """How often each task is drawn, by its share; None: each once an epoch."""
    reviews: bool = False
    """Whether complete groups are to be reviewed."""
    deterministic: bool = False
    """Whether the environment gives the same observations for the same seed and actions."""


class PlanReader(Protocol):
    """What the plan reads of the turn log; see `StoreReader`."""

    def read_groups(self, state: GroupState | None = None, *, group_id: str | None = None) -> Sequence[GroupRecord]:
        """Planned groups, oldest first."""

    def read_sessions(self, *, group_id: str | None = None) -> Sequence[StoredSession]:
        """Sessions, oldest first."""

    def read_trajectory(self, rollout_id: str, attempt: int | None = None) -> Trajectory:
        """One rollout in tokens."""

    def read_events(self, rollout_id: str | None = None) -> Sequence[StoredEvent]:
        """What happened in a rollout's sessions and is no turn."""


class PlanLog(Protocol):
    """What the plan writes into the turn log; see `TurnLog`. What is awaited is durable."""

    @property
    def reader(self) -> PlanReader:
        """The other direction."""

    def put_group(self, group: GroupRecord) -> Awaitable[bool]:
        """A planned group; False where its id is there."""

    def update_group(
        self, group_id: str, *, state: GroupState | None = None, attempt: int | None = None
    ) -> Awaitable[bool]:
        """A group's new state."""

    def discard_session(self, rollout_id: str, attempt: int, reason: str) -> Awaitable[bool]:
        """Takes a session out for good."""

    def add_event(self, rollout_id: str, attempt: int, kind: str, data: Mapping[str, Any]) -> Awaitable[None]:
        """Notes something of a session that is no turn."""


@dataclass(frozen=True, slots=True)
class Load:
    """Where the groups that are not finished with are."""

    open: int
    ready: int
    claimed: int
    unfinished: int = 0
    """Rollouts of the open groups that have not ended."""

    @property
    def total(self) -> int:
        """All groups of them."""
        return self.open + self.ready + self.claimed
