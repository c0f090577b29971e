"""Words of the playing side: who answers an environment, within which limits, and against which session.

Flows: `run_group` opens sessions at a `SessionHost`, plays an `Env` with a `Policy` per session, and closes each with
    its `Episode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
    session_url: str = ""
    """OpenAI base URL that names the session itself, ending in /v1: for agents that can be given a URL but no key."""


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
    replay: bool = False
    """They were under way before: their sessions are opened again and give the recorded replies again, as far as those go."""

    @property
    def rollouts(self) -> tuple[int, ...]:
        """The indices to play."""
        return self.indices or tuple(range(self.group_size))


@dataclass(frozen=True, slots=True)
class PlayedRollout:
    """One rollout of a complete group, as a reviewer sees it."""

    index: int
    rollout_id: str
    attempt: int
    reward: float | None
    """None where a fault left it unknown."""
    components: Mapping[str, float]
    stop_reason: str
    truncated: bool
    tokens: int
    """Sampled ones."""
    turns: int
    """Model calls."""


@dataclass(frozen=True, slots=True)
class ReviewRequest:
    """A complete group that waits for the run's own `RolloutPlan` to say what becomes of it."""

    group_id: str
    task: Task | int
    rollouts: tuple[PlayedRollout, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a complete group."""

    keep: bool = True
    reason: str = ""
    """Why it is dropped, in a word that is counted; "" where it is kept."""
    rewards: Mapping[int, float | None] = field(default_factory=dict)
    """Index -> the reward that counts, of the rollouts whose reward changes; None: unknown, never trained."""


class SessionHost(Protocol):
    """Where sessions are opened and closed. Thread-safe."""

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """Opens the session of rollout `index` of the group."""

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """Ends it with its episode; the last one of a group completes the group."""

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """The session's turns in messages: one list per branch, oldest first, each from its first request to its last reply."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The surroundings of an agent that plays: `palestra.agents.session.current()` gives them inside `Agent.run`."""

    task: Task
    messages: tuple[Message, ...]
    """The environment's first messages: what a policy would have been asked."""
    tools: tuple[ToolSpec, ...]
    """The environment's tools, as they are described to a model."""
    session: SessionHandle
    workspace: Path
    """An empty folder of this episode's own; files left in it can be scored."""
    deadline: float
    """time.monotonic() when the episode is cut."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent says of its own run. All of it is optional: the conversation is taken from the session's turns."""

    reward: float | None = None
    """A score of the agent's own harness, used instead of the environment's rubric where it is given."""
    components: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The final answer, where it is not the last assistant message."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Kept with the episode, for the reader."""


class Agent(Protocol):
    """Plays one session by itself, by its URL. One instance serves many episodes, in threads of their own."""

    def run(self, task: Task, session_url: str, workspace: Path) -> Outcome:
        """Plays until it is done; it may block. `session_url` is an OpenAI base URL that carries the session's key: nothing else is needed
        to talk to the model. Keys, first messages and tools: `palestra.agents.session.current()`.

        Raises:
            PolicyStop: it was cut (deadline, window, budget): scored with what there is.
            Exception: anything else is a fault: no reward, played again within the budget.
        """
