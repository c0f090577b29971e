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
    not_built: ClassVar[frozenset[str]] = frozenset({"entry", "command"})
    kind: Literal["chat", "python", "command"] = "chat"
    """`chat`: the message loop with the environment's tools."""
    request_timeout_s: float = Field(300.0, gt=0)
    """How long one model call may take, seconds; the episode's own deadline cuts it earlier."""

    @model_validator(mode="after")
    def _only_chat(self) -> Self:
        if self.kind != "chat":
            raise ValueError(f"not built: agent.kind = {self.kind!r}; use 'chat'")
        return self


class GroupsConfig(Section):
    """`[algo]`, the half about groups: how many, how large, how they are sampled and what cuts them."""

    table: ClassVar[str] = "algo"
    groups_per_step: int = Field(8, ge=1)
    """Groups of one training batch."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one task."""
    temperature: float = Field(1.0, gt=0)
    """Training traffic is sampled from the whole distribution at this temperature."""
    max_response: int = Field(256, ge=1)
    """Tokens of one reply."""
    max_turns: int = Field(8, ge=1)
    """Model calls of one episode."""
    max_context: int | None = Field(None, ge=1)
    """Tokens of prompt and reply together; None: the engine's window."""
    drop_zero_variance: bool = True
    """Groups whose rewards are all equal are dropped and counted: their advantage is zero."""
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
