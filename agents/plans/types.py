"""Words of programmable rollouts: what a program of the user's is given, what it gives back, and what it needs of the service.

Flows: assignments come from a `PlanService`; a program plays them, or has them played, and says by a `Verdict` what becomes of each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from palestra.agents.types import AgentError, GroupAssignment, ReviewRequest, SessionHandle, SessionHost, Verdict
from palestra.envs.types import Episode, Task

Masks: TypeAlias = Sequence[Sequence[int]]
"""Per row of a session, in their order, a 0 or 1 per token."""


class PlanError(ValueError):
    """A program of the user's that cannot be loaded, or that gave something that cannot be used: says which and what to do."""


class NoMoreWorkError(AgentError):
    """The schedule opens no more groups at present: says why, and what would open some."""


class SettledError(AgentError):
    """A rollout of a prompt whose fate was decided meanwhile: nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session's tokens as they stand: one row for each branch of its conversation."""

    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    """Where each token is from: prompt, sampled, observation, close, or shared (sampled, and trained in an earlier row)."""
    logprobs: tuple[float | None, ...]
    """The engine's; None where the token was not sampled."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """(policy version, start, end) of what was sampled."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token can be trained on, which is the mask of a row that nobody gave another one: begin with it."""
        return [int(source == "sampled") for source in self.sources]

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The policy version of each token; None where it was not sampled."""
        found: list[int | None] = [None] * len(self)
        for version, start, end in self.spans:
            found[start:end] = [version] * (end - start)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as a function returns it. `dataclasses.replace(sample, reward=...)` gives it another reward."""

    group_id: str
    index: int
    """Which rollout of its group."""
    rollout_id: str
    attempt: int
    task: Task
    reward: float | None
    """None: unknown, never trained."""
    components: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[SessionRow, ...] = ()
    """Its tokens, a row per branch."""
    masks: tuple[tuple[int, ...], ...] = ()
    """Per row what is trained on."""
    truncated: bool = False
    """A limit cut it."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the last row: the whole conversation where there is one branch."""
        return self.rows[-1].token_ids if self.rows else ()

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """Of the last row."""
        return self.rows[-1].logprobs if self.rows else ()

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Of the last row."""
        return self.masks[-1] if self.masks else ()

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Of the last row."""
        return self.rows[-1].versions if self.rows else ()


class RolloutHost(SessionHost, Protocol):
    """Where the sessions of a function's rollouts are. Thread-safe."""

    def close_session(self, handle: SessionHandle, episode: Episode, masks: Masks | None = None) -> None:
        """As in `SessionHost`. `masks`: made by hand, one per row; None: everything that was sampled.

        Raises:
            MaskRefusedError: law 2 refuses one; the session stays open.
        """

    def rows(self, handle: SessionHandle) -> tuple[SessionRow, ...]:
        """The session's rows as they stand."""


class MaskRefusedError(AgentError):
    """A mask made by hand that has a 1 on a token which the engine did not sample, or another length than its row."""


class PlanService(RolloutHost, Protocol):
    """A run's service as a program's runner sees it. Thread-safe."""

    def work(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment | ReviewRequest | None:
        """What is to be played or reviewed next; None where nothing came within `wait_s` seconds."""

    def skip(self, group_id: str, reason: str) -> None:
        """Refuses a task before it is played; its place in the schedule is free again."""

    def verdict(self, group_id: str, verdict: Verdict) -> None:
        """Says what becomes of a group; can be repeated."""

    def waits(self) -> str:
        """Who waits for whom at present, in a sentence."""

    def committed_step(self) -> int:
        """Train steps that are done."""
