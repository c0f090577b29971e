"""Words of the buffer: token counts of a rollout, a group as the database knows it, what a restore did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from palestra.server.types import Buffer, GroupState, ServerError, TrajectoryGroup


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
    put_at: float = 0.0
    """Unix seconds."""
    ended_at: float | None = None
    """When it was committed or dropped; Unix seconds."""
    shelf: str | None = None
    """What its arrays are deleted with: a segment, or its own id where each group lies by itself; None where they are not stored."""
    stored_bytes: int = 0
    """Size of its arrays, where they are stored."""
    free_at: float | None = None
    """When `collect` first found that no restore can need its arrays; Unix seconds."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `restore` did."""

    readied: tuple[str, ...]
    """Groups that are ready again."""
    abandoned: tuple[str, ...]
    """Groups dropped since they hold tokens of weights that the restored run never had."""
    next_version: int
    """The first policy version that was never published."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Groups of one state, now."""

    groups: int
    oldest_s: float
    """Seconds since the oldest of them was put; 0 where there is none."""
    mean_s: float
    """Mean of the same."""


class RunBuffer(Buffer, Protocol):
    """What a rollout service needs of a run's buffer: a `Buffer`, the lineage of weights, and what is known of each group. Thread-safe."""

    def close(self) -> None:
        """Lets go of files and connections. Nothing needs to be flushed."""

    def claim(self, n: int, owner: str, ttl_s: float, *, claim_id: str | None = None) -> list[TrajectoryGroup]:
        """As in `Buffer`; with a `claim_id`, a claim that is repeated since its reply was lost gives the same groups, those still held."""

    def reclaim(self, claim_id: str, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        """What `owner` still holds of an earlier claim, its leases extended; empty where there was no such claim."""

    def descends(self, versions: Iterable[int]) -> bool:
        """Whether none of these weights was abandoned by a restore: a group with tokens of such is recorded as dropped when it is put."""

    def dropped(self, reason: str) -> list[str]:
        """Ids of the groups that were dropped for this reason, oldest first."""

    def put_dropped(self, group: TrajectoryGroup, reason: str) -> bool:
        """Records a group that is not to be trained, with its counts and without its arrays. False: its id is there already."""

    def recount(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Notes the counts of groups whose rows were masked further after they had been put: the ledger counts what was trained."""

    def record_publish(self, version: int, train_step: int) -> None:
        """Notes, before any engine has them, that the weights after `train_step` are published as `version`.

        Raises:
            VersionRefused: the version is not above every earlier one.
        """

    def highest_version(self) -> int:
        """The highest version that was ever published; -1 where none was."""

    def train_step_of(self, version: int) -> int:
        """The train step whose weights were published as `version`; 0 for what was there before the first publish."""

    def restore(self, train_step: int, policy_version: int) -> RestoreReport:
        """Goes back to a checkpoint taken after `train_step`, whose weights had been published as `policy_version`.

        Raises:
            StoreError: a group that would have to be trained again is no longer stored; nothing was changed.
        """

    def drop_older_than(self, train_step_now: int, max_staleness: int, *, newest: bool = False) -> list[str]:
        """Drops ready groups whose oldest token (with `newest`: whose newest token) was sampled more than `max_staleness` train steps ago,
        as stale; returns their ids."""

    def ready_count(self) -> int:
        """Groups that a claim could take now."""

    def counts(self) -> dict[str, int]:
        """Groups by state: ready (expired leases included), claimed, committed, dropped, and each dropped(reason)."""

    def depths(self) -> dict[str, Depth]:
        """Of the states ready and claimed: how many groups there are, and how long they have been there."""

    def collect(self, oldest_kept_train_step: int) -> list[str]:
        """Deletes arrays that no restore can need, given the train step of the oldest checkpoint kept; returns names of what is gone."""


class RunBufferReader(Protocol):
    """A buffer as those see it who only look: `inspect`, `status`, the ledger, `palestra buffer`."""

    def close(self) -> None:
        """Ends the connection."""

    def entries(self) -> tuple[GroupEntry, ...]:
        """All groups, in the order in which they were put."""

    def counts(self) -> dict[str, int]:
        """As `RunBuffer.counts`."""

    def read_group(self, group_id: str) -> TrajectoryGroup:
        """The rows of one group, whatever its state.

        Raises:
            StoreError: there is no such group, its arrays are no longer stored, or they are damaged.
        """

    def publishes(self) -> tuple[tuple[int, int, bool], ...]:
        """(version, train step, whether it was abandoned by a restore), by version."""
