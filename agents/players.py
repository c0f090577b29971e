"""Who plays a session: a policy in the environment's own loop, or an agent that runs by itself.

The `[agent]` section goes in, a `Player` comes out, which a worker uses for all its rollouts at once. It waits where `play` and
`play_agent` do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from palestra.agents.chat import ChatPolicy
from palestra.agents.command import CommandAgent
from palestra.agents.config import AgentConfig
from palestra.agents.foreign import play_agent
from palestra.agents.play import Env, play
from palestra.agents.python import PythonAgent
from palestra.agents.types import Agent, Limits, Policy, PolicyReply, SamplingParams, SessionHandle, SessionHost
from palestra.agents.workspace import Workspaces
from palestra.envs.types import Episode, Message, Task, ToolSpec


class Player(Protocol):
    """Plays one episode in an open session. Thread-safe: one serves all rollouts of a worker."""

    def play(
        self,
        env: Env,
        host: SessionHost,
        handle: SessionHandle,
        limits: Limits,
        task: Task,
        seed: int,
        replied: threading.Event,
    ) -> Episode:
        """The episode, from reset to the end. `replied` is set once the session has its first reply: siblings wait for it."""


@dataclass(frozen=True, slots=True)
class PolicyPlayer:
    """Plays with a policy of its own for each session."""

    make_policy: Callable[[SessionHandle], Policy]

    def play(
        self,
        env: Env,
        host: SessionHost,
        handle: SessionHandle,
        limits: Limits,
        task: Task,
        seed: int,
        replied: threading.Event,
    ) -> Episode:
        """See `Player.play`."""
        return play(env, Signalling(self.make_policy(handle), replied), limits, task=task, seed=seed)


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays with one agent, which runs by itself."""

    agent: Agent
    workspaces: Workspaces = field(default_factory=Workspaces)

    def play(
        self,
        env: Env,
        host: SessionHost,
        handle: SessionHandle,
        limits: Limits,
        task: Task,
        seed: int,
        replied: threading.Event,
    ) -> Episode:
        """See `Player.play`."""
        return play_agent(
            env,
            self.agent,
            host,
            handle,
            limits,
            task=task,
            seed=seed,
            workspaces=self.workspaces,
            replied=None if replied.is_set() else replied.set,
        )


def player_of(config: AgentConfig, sampling: SamplingParams, workspaces: Path) -> Player:
    """The player that a run asks for. `workspaces`: where folders of episodes are made if they are kept.

    Raises:
        AgentError: the agent cannot be loaded, or its program is not there.
    """
    if config.kind == "chat":
        return PolicyPlayer(lambda handle: ChatPolicy(handle, sampling, request_timeout_s=config.request_timeout_s))
    if config.kind == "python":
        assert config.entry is not None, "the configuration was checked"
        agent: Agent = PythonAgent(config.entry)
    else:
        agent = CommandAgent(config.command, config.env, config.pass_env)
    return AgentPlayer(agent, Workspaces(workspaces if config.keep_workspace else None, config.keep_workspace))


class Signalling:
    """A policy that passes calls on and says when the first reply (or fault) has come."""

    def __init__(self, policy: Policy, event: threading.Event) -> None:
        self._policy, self._event = policy, event

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        """See `Policy.act`."""
        try:
            return self._policy.act(messages, tools, timeout_s)
        finally:
            self._event.set()
