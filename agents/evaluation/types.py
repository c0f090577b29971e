"""Words of an evaluation: what was asked for, what is planned, and what is kept of every episode.

Flows: an `EvalSpec` and an environment's tasks make a `Plan`; every episode that ends becomes a `Row` of `episodes.jsonl`; `run.json`
holds the `Header`. All figures are computed from these two files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from palestra.envs.types import Message, Reward, StopReason, ToolSpec

Key: TypeAlias = tuple[str, int]
"""(task hash, k): names one planned episode."""


class EvalError(Exception):
    """An evaluation that cannot be begun, gone on with or read; says which folder or line, and what to do."""


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """What is evaluated. Written to `run.json`; a resumed evaluation must ask for the same."""

    env: str
    """A gymnasium id; `package.module:id` imports the module first."""
    model: str
    """The name that every call carries."""
    base_url: str = ""
    """OpenAI base URL, ending in /v1; empty where `service` is given."""
    service: str = ""
    """The folder of a running `palestra serve`; empty where `base_url` is given."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    tasks: str | None = None
    """A JSONL file of tasks; None: the environment's own."""
    n: int | None = None
    """Tasks that are played; None: all."""
    k: int = 1
    """Episodes of each task, all with the same seed of the environment."""
    order: str = "shuffle"
    """Which n tasks: the first ones of a seeded shuffle, or as they lie (sequential)."""
    seed: int = 0
    """Seeds the shuffle, the environments and, where `model_seed` is set, the model's sampling."""
    model_seed: bool = True
    """Every call names a seed of its episode's own. Off for servers that refuse the field."""
    temperature: float = 1.0
    max_tokens: int = 1024
    """Of one reply."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as top_p; null takes a field out."""
    max_turns: int = 8
    """Model calls of one episode."""
    deadline_s: float = 600.0
    """Wall time of one episode, seconds."""
    request_timeout_s: float = 300.0
    """Of one model call, seconds; the episode's deadline cuts it earlier."""
    agent: Mapping[str, Any] = field(default_factory=lambda: {"kind": "chat"})
    """The `[agent]` section of training: who plays."""
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """The `[sandbox]` section of training: where environments run code."""
    pass_reward: float = 1.0
    """An episode counts as right from this reward on: for pass@k."""
    price_in: float | None = None
    """Per million prompt tokens."""
    price_out: float | None = None
    """Per million sampled tokens."""


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One task of the plan."""

    hash: str
    """Of its content (prompt, answer, id, meta): 16 hex digits."""
    id: str
    index: int
    """Its place in the source of tasks."""


@dataclass(frozen=True, slots=True)
class Header:
    """`run.json`: all that is known before the first episode."""

    spec: EvalSpec
    tasks: tuple[PlannedTask, ...]
    task_set: str
    """Hash over the tasks, whatever their order: evaluations with equal ones can be compared."""
    provenance: Mapping[str, Any]
    """Versions, commits and machine: of palestra, of the environment's distribution, of what they stand on."""
    created: str
    """UTC, ISO 8601."""
    rescored_from: str | None = None
    """The folder whose conversations were scored again."""
    changes: tuple[Mapping[str, Any], ...] = ()
    """What `--allow-changed` let through: {"at", "differences"}."""
    format: int = 1

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every planned episode."""
        return tuple((task.hash, k) for task in self.tasks for k in range(self.spec.k))


@dataclass(frozen=True, slots=True)
class Usage:
    """What the model calls of an episode took."""

    calls: int = 0
    """Calls that were answered."""
    told: int = 0
    """Calls whose reply told its tokens; with fewer than `calls` the sums are too small."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, where the server says so."""
    call_seconds: tuple[float, ...] = ()
    """Wall time of each answered call, waits before repetitions left out."""
    retries: int = 0
    """Calls that were sent again because the server was busy or failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finished episode: a line of `episodes.jsonl`."""

    task: str
    """The task's hash."""
    k: int
    task_id: str
    seed: int
    """Of the environment."""
    messages: tuple[Message, ...]
    reward: Reward
    """Its value is None where a fault of the infrastructure or of a grader left it unknown."""
    step_rewards: tuple[float | None, ...]
    stop_reason: StopReason
    terminated: bool
    truncated: bool
    turns: int
    answer: Any = None
    """The task's own, for the reader."""
    tools: tuple[ToolSpec, ...] = ()
    tool_calls: int = 0
    tool_errors: int = 0
    usage: Usage = Usage()
    seconds: float = 0.0
    """Wall time from reset to the end."""
    ended: str = ""
    """UTC, ISO 8601."""
    error: str | None = None
    """The fault's text; None also where only a grader failed: then `reward.note` says why."""

    @property
    def key(self) -> Key:
        """Which planned episode it is."""
        return (self.task, self.k)

    @property
    def scored(self) -> bool:
        """Whether its reward is known."""
        return self.reward.value is not None
