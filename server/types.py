"""Words of the token side: what the rollout service stores, and what the trainer receives. numpy is the heaviest import.

Flows: an engine gives a `Completion`, the recorder keeps it as a `Turn`, a finished session is a `Trajectory`, its rows are
`TrainingSample`s, and the rows of one task's rollouts travel through the buffer as a `TrajectoryGroup`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I16 = NDArray[np.int16]


class ServerError(Exception):
    """Root of the service's errors."""


class EngineError(ServerError):
    """The engine could not answer: unreachable, died, or broke the contract (lengths, ids, versions)."""


class EngineRefused(EngineError):
    """The engine refused the request itself (HTTP 400): repeating it cannot help."""


class SessionError(ServerError):
    """A session is unknown, closed, or was asked for something it cannot do. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class RenderError(ServerError):
    """Messages that the model's family cannot express as tokens."""


class StoreError(ServerError):
    """The run's store could not write or read (disk full, damaged record). Nothing that was acknowledged is lost."""


class LeaseLost(ServerError):
    """Groups were committed or renewed by somebody who no longer owns them: the step must be dropped."""


class SampleError(ServerError):
    """A training row that breaks a law (a mask on a token that the engine did not sample, arrays of unequal length)."""


class TokenSource(IntEnum):
    """Where a token of a row comes from. Only SAMPLED can carry mask 1 in reinforcement learning; DEMO only in supervised rows."""

    PROMPT = 0  # rendered from the first request's messages
    SAMPLED = 1  # sampled by the engine, trained on
    OBSERVATION = 2  # rendered from messages that came after a reply, with the template's own tokens around them
    CLOSE = 3  # an end of turn that was put in because the reply ran into its length limit
    SHARED = 16  # sampled, but trained in another row of the same rollout that shares this prefix
    OVERLONG = 17  # sampled, masked because the episode was cut by a limit and the run masks those
    STALE = 18  # sampled, masked because it is older than the staleness bound
    UNSCORED = 19  # sampled, masked because the rollout's reward is unknown
    DEMO = 32  # written by a demonstration: supervised rows only


SAMPLED_SOURCES = frozenset(
    {TokenSource.SAMPLED, TokenSource.SHARED, TokenSource.OVERLONG, TokenSource.STALE, TokenSource.UNSCORED}
)
"""Every source that counts as sampled in the token ledger."""
SAMPLED, _DEMO = int(TokenSource.SAMPLED), int(TokenSource.DEMO)
"""numpy compares bytes with a plain int several times faster than with an IntEnum."""


class GroupState(StrEnum):
    """Life of a group in the buffer: open -> ready -> claimed -> committed, or dropped with a reason."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    COMMITTED = "committed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start <= i < end` were sampled by `version`. Positions count within the completion or the row it is attached to."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt, resumed parts joined."""

    token_ids: tuple[int, ...]
    """The end token included, if one was sampled."""
    logprobs: tuple[float, ...]
    """log p of each id at the sampling temperature, over the whole vocabulary; same length as token_ids."""
    finish_reason: str
    """stop, length or abort."""
    spans: tuple[VersionSpan, ...]
    """Cover 0..len(token_ids)."""
    cached_tokens: int = 0
    """Prompt tokens whose cache was reused."""
    routed_experts: I16 | None = None
    """[prompt + completion - 1, layers, topk], where the engine was asked for them."""
    top_logprobs: tuple[tuple[tuple[float, int], ...], ...] = ()
    """Per token the likeliest (logprob, id) at its place, where they were asked for."""
    stop_text: str | None = None
    """The stop text that ended it; its tokens are in token_ids."""
    kept: int = -1
    """How many of token_ids are the reply, where an engine sampled past a stop text that an abort had cut in two; -1: all."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a session."""

    index: int
    """Order of the session's calls, from 0."""
    parent: int | None
    """Index of the turn whose prompt and completion this prompt extends id for id; None starts a branch."""
    prompt_delta: I32
    """The ids after the parent's prompt and completion; the whole prompt where parent is None."""
    close_tokens: int
    """How many leading ids of prompt_delta are a close that the parent's length limit made necessary."""
    completion_ids: I32
    logprobs: F32
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    """Positions within completion_ids."""
    temperature: float
    fork_reason: str | None = None
    """Why a branch was started although the session already had turns."""
    ill_formed: str | None = None
    """Why a tool call in it could not be read; None where there is none or it could."""
    tools: str = ""
    """The tools that the prompt lists, as canonical JSON; only where parent is None, those after it have the same."""
    opened: int = 0
    """Trailing ids of prompt_delta that belong to the assistant's turn already: an open think block, the opening of a forced call."""
    cached_tokens: int = 0
    delivered: bool = True
    """False where the caller was gone before the reply left: it is never trained."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The request's new messages (all of them where parent is None) and the reply, for the reader."""
    routed_experts: I16 | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout in tokens."""

    rollout_id: str
    attempt: int
    group_id: str
    task_id: str
    turns: tuple[Turn, ...]
    reward: float | None
    turn_rewards: tuple[float | None, ...]
    stop_reason: str
    truncated: bool


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One row: a root-to-leaf path of a trajectory. All arrays have length T; position t speaks of token t itself."""

    rollout_id: str
    attempt: int
    group_id: str
    task_id: str
    branch: int
    """Which leaf of the rollout, from 0."""
    token_ids: I32
    loss_mask: U8
    """1 exactly where the token is trained on."""
    sources: U8
    """`TokenSource` of each token."""
    logprobs: F32
    """The engine's log p; NaN where the token was not sampled."""
    spans: tuple[VersionSpan, ...]
    """Row positions; cover every sampled token."""
    temperature: float
    reward: float | None
    turn_rewards: tuple[float | None, ...]
    stop_reason: str
    routed_experts: I16 | None = None

    def __post_init__(self) -> None:
        check_sample(self)


def unchecked_sample(**fields: Any) -> TrainingSample:
    """A row that was checked when it was first made, and has not changed since: checking costs more than all else of reading it. Every
    field is to be given."""
    row = object.__new__(TrainingSample)
    for name, value in fields.items():
        object.__setattr__(row, name, value)
    return row


def check_sample(row: TrainingSample) -> None:
    """Laws 1 and 2 for one row.

    Raises:
        SampleError: arrays of unequal length; mask 1 on a token that was not sampled, has no finite logprob or no known version.
    """
    n = len(row.token_ids)
    where = f"row {row.rollout_id}/{row.attempt} branch {row.branch}"
    lengths = {"loss_mask": len(row.loss_mask), "sources": len(row.sources), "logprobs": len(row.logprobs)}
    if bad := {name: size for name, size in lengths.items() if size != n}:
        raise SampleError(f"{where}: token_ids has {n} entries but {bad}")
    if n == 0:
        raise SampleError(f"{where}: no tokens")
    trained = row.loss_mask.astype(bool)
    good = row.sources == SAMPLED
    good &= trained
    count = np.count_nonzero(good)
    if count != np.count_nonzero(trained) and (odd := trained & ~good & (row.sources != _DEMO)).any():
        at = int(np.flatnonzero(odd)[0])
        raise SampleError(f"{where}: mask 1 at {at}, whose source is {TokenSource(int(row.sources[at])).name}")
    good &= np.isfinite(row.logprobs)
    if np.count_nonzero(good) != count:
        raise SampleError(f"{where}: mask 1 on a token without a finite logprob")
    known = np.zeros(n, dtype=bool)
    for span in row.spans:
        start, end = span.start, span.end
        if span.version < 0 or not 0 <= start <= end <= n:
            raise SampleError(f"{where}: bad version span {span}")
        known[start:end] = True
    good &= known
    if np.count_nonzero(good) != count:
        raise SampleError(f"{where}: mask 1 on a token whose policy version is unknown")


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The rows of the k rollouts of one task."""

    group_id: str
    task_id: str
    group_size: int
    """k as it was asked for; rollouts that an infrastructure fault took have no rows."""
    samples: tuple[TrainingSample, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """rollout_id -> reward, each rollout once, the scored ones only."""

    @property
    def min_version(self) -> int:
        """The oldest policy version of a trained token; -1 where nothing is trained."""
        return min((s.version for row in self.samples for s in row.spans), default=-1)

    @property
    def max_version(self) -> int:
        """The newest policy version of a sampled token; -1 where nothing was sampled."""
        return max((s.version for row in self.samples for s in row.spans), default=-1)


class Buffer(Protocol):
    """A durable queue of groups. `put`, `claim`, `commit`, `release` can be repeated without harm."""

    def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Stores groups durably as ready; a group id that is already there is left alone. Returns how many were new."""

    def claim(self, n: int, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        """Up to `n` ready groups, oldest first, leased to `owner` for `ttl_s` seconds. Expired leases are ready again."""

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Extends leases; returns how many `owner` still holds."""

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained in `step`, restorable from `checkpoint_id`, all or none; returns how many.

        Raises:
            LeaseLost: `owner` no longer holds all of them; nothing was marked.
        """

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Gives leased groups back unread; returns how many."""

    def drop(self, group_ids: Sequence[str], reason: str) -> int:
        """Takes groups out for good, counted under `reason`."""


class PublishMode(StrEnum):
    """What happens to running requests when weights change (`schedule.update_mode`)."""

    FINISH = "finish"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A transcript in tokens: what `render` gives for supervised training."""

    token_ids: I32
    loss_mask: U8
    """1 on the tokens that an assistant turn consists of, its end token included."""
