"""Who plays an evaluation: the chat policy against the model's URL, or an agent that runs by itself.

A spec goes in, a `Player` comes out. It waits where `play` and `play_agent` do.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.agents.chat import ChatPolicy
from palestra.agents.config import AgentConfig
from palestra.agents.evaluation.calls import Meter, PatientPolicy
from palestra.agents.evaluation.plan import model_seed
from palestra.agents.evaluation.types import EvalSpec, Key
from palestra.agents.players import Player, PolicyPlayer, player_of
from palestra.agents.types import GroupAssignment, Policy, SamplingParams, SessionHandle
from palestra.envs.types import Episode, Message


@dataclass(frozen=True, slots=True)
class PlainHost:
    """A model's URL as a `SessionHost` for the chat policy: all sessions are the same URL and key."""

    base_url: str
    api_key: str

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`."""
        return SessionHandle(f"{assignment.group_id}-{index}", assignment.attempt, self.base_url, self.api_key)

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """Nothing to close."""

    def conversation(self, handle: SessionHandle) -> list[list[Message]]:
        """Nothing is kept here."""
        return []


def eval_player(
    spec: EvalSpec, meter: Meter, key_of: Callable[[SessionHandle], Key], leaving: threading.Event, workspaces: Path
) -> Player:
    """The player of an evaluation. `key_of`: which episode a session is of; `leaving`: set when nobody waits any more.

    Raises:
        AgentError: the agent cannot be loaded.
    """
    agent = AgentConfig.model_validate(dict(spec.agent))
    if agent.kind != "chat":
        return player_of(agent, SamplingParams(spec.temperature, spec.max_tokens), workspaces)

    def make_policy(handle: SessionHandle) -> Policy:
        policy = ChatPolicy(
            handle,
            SamplingParams(spec.temperature, spec.max_tokens, _seed_of(spec, key_of(handle))),
            model=spec.model,
            request_timeout_s=spec.request_timeout_s,
            params=spec.params,
            on_usage=functools.partial(meter.usage, handle.rollout_id),
        )
        return PatientPolicy(policy, meter, handle.rollout_id, leaving)

    return PolicyPlayer(make_policy)


def _seed_of(spec: EvalSpec, key: Key) -> int | None:
    return model_seed(spec.seed, *key) if spec.model_seed else None


def request_defaults(spec: EvalSpec) -> dict[str, Any]:
    """What a request of an agent gets where it says nothing itself."""
    fields = {"model": spec.model, "temperature": spec.temperature, "max_tokens": spec.max_tokens, **spec.params}
    return {name: value for name, value in fields.items() if value is not None}
