"""Words of the message side: what an environment takes and gives. No token appears here and nothing heavy is imported.

Flows: a `Task` goes into `Env.reset`, messages come out, an `Episode` is what is left when it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""One chat message in OpenAI's form: role, content, tool_calls, tool_call_id, name."""

ToolSpec: TypeAlias = dict[str, Any]
"""One tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""


class StopReason(StrEnum):
    """Why an episode ended. `finish_reason` is another thing: it stays with each turn."""

    ANSWER = "answer"  # the policy answered; the environment terminated
    ENV_DONE = "env_done"  # the environment ended it for a reason of its own
    MAX_TURNS = "max_turns"  # the limit on model calls cut it
    MAX_TOKENS = "max_tokens"  # one reply ran into its token limit and nothing usable came of it
    CONTEXT = "context"  # prompt and reply no longer fit the window
    DEADLINE = "deadline"  # the wall clock cut it
    CANCELLED = "cancelled"  # the run stopped while it was going on
    INFRA = "infra"  # an infrastructure fault: never scored as the policy's failure


class EnvError(Exception):
    """A fault of the environment (a tool's bug, a dead sandbox). The episode has no reward; it is not the policy's
    failure.
    """


class ToolError(Exception):
    """A tool's way of saying no to the model: its text goes back as the tool's result."""


class TaskError(ValueError):
    """A task, or a file of tasks, that cannot be used: says which file, which line and why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem."""

    prompt: str | tuple[Message, ...]
    """The question: the text of a user message, or whole messages (few-shot examples included)."""
    answer: Any = None
    """What the rubric compares with; never shown to the policy."""
    id: str = ""
    """Unique within its source."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Anything else the environment wants to know, such as a level of difficulty."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of one episode."""

    value: float | None
    """The sum that is trained on; None where an infrastructure or grader fault left it unknown (never 0 for that)."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts, unweighted, for the reader."""
    note: str = ""
    """One line that says why, where the rubric has something to say."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """By the name of a part: why it could not be judged. A fault of the grader, never of the policy."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What `reset` and `step` put under `info["step"]`. Equal for equal seeds and actions: wall times are not
    compared.
    """

    task_id: str
    turn: int
    """Model calls so far: 0 after reset."""
    stop_reason: StopReason | None = None
    """Set on the step that ended the episode."""
    reward: Reward | None = None
    """Set on the step that ended the episode."""
    tool_calls: int = 0
    """Calls so far, valid or not."""
    tool_errors: int = 0
    """Calls so far that were answered with an error text."""
    tool_seconds: float = field(default=0.0, compare=False)
    """Wall time spent in tools so far."""
    step_reward: float | None = 0.0
    """What the environment gave for this step alone, without the final score; None where unknown."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a task in messages."""

    task_id: str
    messages: tuple[Message, ...]
    """The whole conversation, in order."""
    tools: tuple[ToolSpec, ...]
    """The tools that were offered."""
    reward: Reward
    step_rewards: tuple[float | None, ...]
    """One number per model call (None where unknown); their sum and the final score make `reward.value`."""
    stop_reason: StopReason
    terminated: bool
    """The task ended."""
    truncated: bool
    """A limit cut it. Never both."""
    turns: int
    """Model calls."""
    tool_calls: int = 0
    tool_errors: int = 0
    error: str | None = None
    """The fault's text (type, message, where) when `stop_reason` is INFRA."""
    seconds: float = 0.0
    """Wall time from reset to the end."""
