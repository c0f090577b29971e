"""Words of the playing side: who answers an environment, within which limits, and against which session.

Flows: `run_group` opens sessions at a `SessionHost`, plays an `Env` with a `Policy` per session, and closes each with
    its `Episode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palestra.envs.types import Episode, Message, StopReason, Task, ToolSpec


class AgentError(Exception):
    """A fault on the way to the model (the service or the engine, not the policy). The episode has no reward."""


class PolicyStop(Exception):
    """The policy cannot go on for a reason that is no fault: the window is full, the session's budget is spent, the run
    stops.
    """

    def __init__(self, reason: StopReason, message: str = "") -> None:
        super().__init__(message or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Limits:
    """What cuts an episode off from outside the environment."""

    max_turns: int = 8
    """Model calls."""
    deadline_s: float = 600.0
    """Wall time from reset to the end, seconds."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the policy is sampled. Training traffic keeps the whole distribution: no top-p, no top-k, no penalties."""

    temperature: float = 1.0
    max_tokens: int = 256
    """Per reply."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class PolicyReply:
    """One answer of a policy."""

    message: Message
    """An assistant message."""
    finish_reason: str
    """stop, length or tool_calls, as the API reports it."""


class Policy(Protocol):
    """Answers a conversation. One instance serves one episode; it may block, in the episode's own thread."""

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        """The next assistant message.

        Raises:
            AgentError: the model could not be reached; the episode ends without a reward.
            PolicyStop: the conversation cannot go on (window full, budget spent); the episode is truncated.
        """


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """One opened session: where the agent is pointed at."""

    rollout_id: str
    attempt: int
    base_url: str
    """OpenAI base URL, ending in /v1."""
    api_key: str
    """Opens this session and nothing else."""


@dataclass(frozen=True, slots=True)
class GroupAssignment:
    """One group of rollouts that a worker was told to play."""

    group_id: str
    group_size: int
    attempt: int
    task: Task | int
    """The task itself, or its index in the environment's own tasks."""
    seed: int
    """Seeds the environment; equal for all rollouts of the group."""
    indices: tuple[int, ...] = ()
    """The rollouts to play, where it is not the whole group: those that a fault ended are played again alone."""

    @property
    def rollouts(self) -> tuple[int, ...]:
        """The indices to play."""
        return self.indices or tuple(range(self.group_size))


class SessionHost(Protocol):
    """Where sessions are opened and closed. Thread-safe."""

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """Opens the session of rollout `index` of the group."""

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """Ends it with its episode; the last one of a group completes the group."""
