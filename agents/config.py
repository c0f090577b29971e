"""The `[agent]` section, and the fields of `[algo]` that concern how groups are played.

The trainer's section derives from `GroupsConfig`, so that one table of the run's file carries both.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from palestra.agents.types import Limits, SamplingParams
from palestra.envs.config import Section


class AgentConfig(Section):
    """`[agent]`: who plays."""

    table: ClassVar[str] = "agent"
    kind: Literal["chat", "python", "command"] = "chat"
    """`chat`: the message loop with the environment's tools. `python`: a function or class of yours. `command`: any program. The last two
    play by themselves against the session's URL; the environment gives the task and the score."""
    entry: str | None = None
    """Of kind python: "package.module:name", or "folder/file.py:name" from the current folder."""
    command: list[str] | str = Field(default_factory=list)
    """Of kind command: its words, or one text that is split as a shell would. {prompt}, {task_file}, {session_url} and {workspace} are
    filled in."""
    env: dict[str, str] = Field(default_factory=dict)
    """Of kind command: environment variables to set."""
    pass_env: list[str] = Field(default_factory=list)
    """Of kind command: names of the worker's own environment variables that the command may see; it sees no others."""
    keep_workspace: bool = False
    """Folders of episodes stay, in `workspaces` of the run's folder. Of kinds python and command."""
    sampling: Literal["strict", "override"] = "strict"
    """What a session does when its agent asks for another temperature than `algo.temperature`: refuse the call (strict), or sample as the
    run says (override)."""
    request_timeout_s: float = Field(300.0, gt=0)
    """Of kind chat: how long one model call may take, seconds; the episode's own deadline cuts it earlier. Agents that play by themselves
    have timeouts of their own."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "python" and not self.entry:
            raise ValueError("agent.entry must be given when agent.kind is 'python'")
        if self.kind == "command" and not self.command:
            raise ValueError("agent.command must be given when agent.kind is 'command'")
        for name, kinds in _OF_KINDS.items():
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if self.kind not in kinds and getattr(self, name) != default:
                raise ValueError(f"agent.{name} has no effect when agent.kind is {self.kind!r}; remove it")
        return self


_OF_KINDS = {
    "entry": ("python",),
    "command": ("command",),
    "env": ("command",),
    "pass_env": ("command",),
    "keep_workspace": ("python", "command"),
    "request_timeout_s": ("chat",),
}
"""Fields that only some kinds use."""


class GroupsConfig(Section):
    """`[algo]`, the half about groups: how many, how large, how they are sampled and what cuts them."""

    table: ClassVar[str] = "algo"
    groups_per_step: int = Field(8, ge=1)
    """Groups of one training batch."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one task."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Training traffic is sampled from the whole distribution at this temperature."""
    max_response: int = Field(256, ge=1)
    """Tokens of one reply."""
    max_turns: int = Field(8, ge=1)
    """Model calls of one episode."""
    max_context: int | None = Field(None, ge=1)
    """Tokens of prompt and reply together; None: the engine's window."""
    drop_zero_variance: bool = True
    """Groups whose rewards are all equal are dropped and counted where that makes their advantage zero: not with estimators that
    compare with the whole batch or with nothing, nor where turns, a penalty in the reward or an advantage of the user's make a
    difference."""
    oversample: float = Field(1.0, ge=1, le=64, allow_inf_nan=False)
    """Groups that may be under way for each group of the batch: the first ready ones are trained, and the others are kept for the next
    step. Of asynchronous schedules the staleness bound says it already."""
    min_group: int = Field(1, ge=1)
    """A group of which at least so many rollouts have a reward is trained without those that a fault took; else it is dropped."""
    max_truncated: float = Field(1.0, ge=0, le=1)
    """Groups of which a larger share of rollouts was cut by a limit are dropped and counted."""
    episode_deadline_s: float = Field(600.0, gt=0)
    """Wall time of one episode, seconds."""
    seed: int = 0
    """Seeds the order of tasks and the environments. Engines sample with seeds of their own."""

    def limits(self) -> Limits:
        """What cuts an episode."""
        return Limits(max_turns=self.max_turns, deadline_s=self.episode_deadline_s)

    def sampling(self) -> SamplingParams:
        """How the policy is sampled."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_response)
