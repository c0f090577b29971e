"""Plays environments of several roles: each role has a policy, a conversation and a reward of its own.

A task, a seed and a policy per role go in; an `Episode` per role comes out, whatever happens. It waits for the policy
whose turn it is, each within what is left of the deadline.

For training, the first role's session is the one that the run opened; `RolesPlayer` opens the others' itself, in groups
of their own (`GROUP.ROLE`), so that the rollouts of a role are compared with each other only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from palestra.agents.play import Env, describe, infra_episode, message_env
from palestra.agents.players import Signalling
from palestra.agents.types import AgentError, Limits, Policy, PolicyStop, SessionHandle, SessionHost
from palestra.envs.core import name_calls
from palestra.envs.dialogue.roles import RolesEnv
from palestra.envs.types import Episode, Message, Reward, StopReason, Task, ToolSpec

logger = logging.getLogger(__name__)


def play_roles(
    env: Env, policies: Mapping[str, Policy], limits: Limits, *, task: Task | int, seed: int
) -> dict[str, Episode]:
    """Plays `task` from reset to the end, all roles by policies. `limits.max_turns` counts each role's model calls.

    - The environment ends it: terminated for all.
    - A limit, or a policy (`PolicyStop`), ends it: truncated for all, and scored with what there is.
    - Anything else that is raised: no role has a reward, whoever's fault it was.

    Raises:
        TypeError: `env` is no `RolesEnv`.
        ValueError: a role without a policy.
    """
    inner = roles_env(env)
    if missing := [role for role in inner.roles if role not in policies]:
        raise ValueError(f"no policy for role {missing[0]!r}; roles: {', '.join(inner.roles)}")
    return _Run(inner, policies, limits).episodes(task, seed)


def roles_env(env: Env) -> RolesEnv:
    """What is inside of all wrappers.

    Raises:
        TypeError: it is no `RolesEnv`.
    """
    inner = message_env(env)
    if not isinstance(inner, RolesEnv):
        raise TypeError(f"several roles need a RolesEnv, got {type(inner).__name__}")
    return inner


@dataclass(slots=True)
class _Run:
    """The state of one episode while it is played."""

    env: RolesEnv
    policies: Mapping[str, Policy]
    limits: Limits
    messages: dict[str, list[Message]] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = ()

    def episodes(self, task: Task | int, seed: int) -> dict[str, Episode]:
        started = time.monotonic()
        roles = self.env.roles
        self.messages = {role: [] for role in roles}
        self.turns, self.calls = dict.fromkeys(roles, 0), dict.fromkeys(roles, 0)
        error, reason, terminated = None, StopReason.INFRA, False
        rewards: Mapping[str, Reward] = {}
        try:
            reason, terminated = self._play(task, seed, started + self.limits.deadline_s)
            rewards = self.env.finish_roles()
        except Exception as fault:  # noqa: BLE001 - whatever user code raises, the episodes are data
            error, reason = describe(fault), StopReason.INFRA
            logger.warning("an episode of several roles ended by a fault: %s", error)
        named = self.env.task.id if self.env.task is not None else task.id if isinstance(task, Task) else str(task)
        return {
            role: Episode(
                task_id=named,
                messages=tuple(self.messages[role]),
                tools=self.tools,
                reward=rewards.get(role, Reward(None, note=error or "never scored")),
                step_rewards=(0.0,) * self.turns[role],
                stop_reason=reason,
                terminated=terminated and error is None,
                truncated=not terminated and error is None,
                turns=self.turns[role],
                tool_calls=self.calls[role],
                error=error,
                seconds=time.monotonic() - started,
            )
            for role in roles
        }

    def _play(self, task: Task | int, seed: int, deadline: float) -> tuple[StopReason, bool]:
        """What ended it, and whether that was the environment."""
        for role, told in self.env.reset_roles(task, seed).items():
            self.messages[role] += told
        self.tools = self.env.tool_specs()
        while True:
            role = self.env.turn_of()
            left = deadline - time.monotonic()
            if self.turns[role] >= self.limits.max_turns:
                return StopReason.MAX_TURNS, False
            if left <= 0:
                return StopReason.DEADLINE, False
            try:
                reply = self.policies[role].act(tuple(self.messages[role]), self.tools, left)
            except PolicyStop as stop:
                return stop.reason, False
            self.turns[role] += 1
            action = name_calls(reply.message, self.turns[role])
            self.calls[role] += len(action.get("tool_calls") or ())
            self.messages[role].append(action)
            turn = self.env.step_role(role, action)
            for listener, new in turn.heard.items():
                self.messages[listener] += new
            if turn.stop is not None:
                return turn.stop, True


class RoleSessions(Protocol):
    """Where sessions beside the run's own are opened and ended; the service's client is one. Thread-safe."""

    def open(
        self,
        *,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        task_id: str = "",
    ) -> SessionHandle:
        """Opens a session. The group is complete when `group_size` of its sessions have ended with an outcome."""

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """Ends one with its episode."""


@dataclass(frozen=True, slots=True)
class RolesPlayer:
    """Plays every role with a policy of its own session. A `Player`: the episode it returns is the first role's, and the
    other roles' sessions are opened and ended here.
    """

    make_policy: Callable[[SessionHandle], Policy]
    sessions: RoleSessions
    group_size: int
    """Rollouts of a group: so many sessions of each role make a group of its own."""

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
        first, *others = roles_env(env).roles
        opened: dict[str, SessionHandle] = {}
        episodes: Mapping[str, Episode] = {}
        fault: Exception | None = None
        try:
            for role in others:
                opened[role] = self._open(handle, role, task)
            policies: dict[str, Policy] = {role: self.make_policy(other) for role, other in opened.items()}
            policies[first] = Signalling(self.make_policy(handle), replied)
            episodes = play_roles(env, policies, limits, task=task, seed=seed)
        except Exception as error:  # noqa: BLE001 - the sessions that were opened have to end, with this as their reason
            fault = error
        for role, other in opened.items():
            episode = episodes.get(role)
            fault = self._close(other, episode or infra_episode(task.id, fault or "never played")) or fault
        if fault is not None:
            return infra_episode(task.id, fault, like=episodes.get(first))
        return episodes[first]

    def _open(self, handle: SessionHandle, role: str, task: Task) -> SessionHandle:
        """A session for another role of the same rollout. One that is played again gets a session outside of the role's
        group, whose place was used up by the rollout that a fault ended: it is on record and not trained."""
        group, _, index = handle.rollout_id.rpartition("-")
        name = f"{group}.{role}-{index}"
        try:
            if handle.attempt:
                return self.sessions.open(rollout_id=f"{name}.{handle.attempt}", task_id=task.id)
            return self.sessions.open(
                rollout_id=name, group_id=f"{group}.{role}", group_size=self.group_size, task_id=task.id
            )
        except Exception as error:
            raise AgentError(f"the session of role {role!r} of {handle.rollout_id}: {error}") from error

    def _close(self, handle: SessionHandle, episode: Episode) -> Exception | None:
        try:
            self.sessions.close_session(handle, episode)
        except Exception as error:
            logger.exception("session %s was not closed", handle.rollout_id)
            return error
        return None
