"""The environment under check, and how scripts are played in it.

An id and arguments go in; environments, tasks and played episodes come out. Waits for the environment's own tools alone: nobody else is
asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import gymnasium as gym

from palestra.envs.checking.types import Broken, Untestable
from palestra.envs.core import MessageEnv, name_calls
from palestra.envs.registry import make_env
from palestra.envs.rubrics.types import text_of
from palestra.envs.spaces import Observation, fresh
from palestra.envs.types import EnvError, Message, Reward, StepInfo, StopReason, Task

Env = gym.Env[Observation, Message]

TURNS = 40
"""Model calls after which an episode of a check is cut."""


@dataclass(frozen=True, slots=True)
class Played:
    """One episode of a script."""

    prompt: tuple[Message, ...]
    """What the reset gave."""
    messages: tuple[Message, ...]
    """What came after it, in order."""
    rewards: tuple[float, ...]
    """What each step gave."""
    infos: tuple[StepInfo, ...]
    """Of the reset, and of each step."""
    terminated: bool
    """False where it was cut."""

    @property
    def reward(self) -> Reward:
        """Its reward record.

        Raises:
            Broken: the last step brought none.
        """
        reward = self.infos[-1].reward
        if reward is None:
            raise Broken(f'the last step of task {self.infos[0].task_id!r} has no reward in info["step"]')
        return reward

    @property
    def value(self) -> float:
        """Its score.

        Raises:
            Broken: the grader failed, so there is none.
        """
        value = self.reward.value
        if value is None:
            raise Broken(f"task {self.infos[0].task_id!r}: the reward is unknown: {self.reward.note or 'no note'}")
        return value


def play_script(
    env: Env, script: Sequence[Message], task: Task, *, seed: int = 0, repeat: bool = False, turns: int = TURNS
) -> Played:
    """Plays `script` from reset to its end, or the episode's. One that is still going on then is cut, and scored. `repeat` says the last
    message again and again.

    Raises:
        EnvError: a fault of the environment.
    """
    observation, info = env.reset(seed=seed, options={"task": task})
    prompt, messages, rewards, infos = tuple(fresh(observation)), list[Message](), list[float](), [info["step"]]
    for turn in range(turns if repeat else min(turns, len(script))):
        action = name_calls(script[min(turn, len(script) - 1)], turn + 1)
        messages.append(fresh(action))
        observation, reward, terminated, truncated, info = env.step(action)
        messages += observation
        rewards.append(float(reward))
        infos.append(info["step"])
        if terminated or truncated:
            return Played(prompt, tuple(messages), tuple(rewards), tuple(infos), bool(terminated))
    score, info = inside(env).finish(StopReason.MAX_TURNS)
    if rewards:
        rewards[-1] += score
    return Played(prompt, tuple(messages), tuple(rewards or [score]), (*infos, info["step"]), False)


def inside(env: Env) -> MessageEnv:
    """What is inside of all wrappers.

    Raises:
        Broken: it is no `MessageEnv`.
    """
    inner = env.unwrapped
    if not isinstance(inner, MessageEnv):
        raise Broken(f"{type(inner).__name__} is no palestra.envs.core.MessageEnv")
    return inner


def same(left: float | None, right: float | None) -> bool:
    """Whether two scores are equal, as floats are."""
    if left is None or right is None or math.isnan(left) or math.isnan(right):
        return False
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)


@dataclass
class Subject:
    """The environment under check. One environment serves the laws that leave it as it was; `make` gives others."""

    env_id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    count: int = 5
    """Tasks that are tried, spread over all of them."""
    wanderings: int = 20
    """Episodes of random actions."""
    _played: dict[tuple[str, str], Played] = field(default_factory=dict)

    def make(self) -> Env:
        """Another environment; its user closes it.

        Raises:
            EnvError: it cannot be made.
        """
        return make_env(self.env_id, self.args)

    @cached_property
    def env(self) -> Env:
        """The shared environment; closed by `close`."""
        return self.make()

    @property
    def inner(self) -> MessageEnv:
        """What is inside of the shared environment's wrappers."""
        return inside(self.env)

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that are tried.

        Raises:
            EnvError: the environment has none of its own.
        """
        source = self.inner.tasks
        size = len(source)
        if not size:
            raise EnvError(f"environment {self.env_id!r} has no tasks of its own, so nothing of it can be checked")
        count = max(1, min(self.count, size))
        return [source[index * size // count] for index in range(count)]

    def oracle(self, task: Task) -> list[Message]:
        """Messages that solve `task`.

        Raises:
            Untestable: the environment has no oracle.
        """
        try:
            return fresh(self.inner.oracle(task))  # type: ignore[no-any-return]
        except NotImplementedError:
            raise Untestable("the environment has no oracle") from None

    def solved(self, task: Task) -> Played:
        """The oracle's episode of one task; played once."""
        return self._once("oracle", task, lambda: play_script(self.env, self.oracle(task), task))

    def silent(self, task: Task) -> Played:
        """An episode of empty answers; played once."""
        script = [{"role": "assistant", "content": ""}]
        return self._once("null", task, lambda: play_script(self.env, script, task, repeat=True))

    def echoed(self, task: Task) -> Played:
        """An episode in which the last message of the prompt is said back; played once."""
        return self._once("echo", task, lambda: self._echo(task))

    def excused(self, law: str) -> str | None:
        """Why a law does not apply to this environment, as its class attribute `excused = {law: reason}` says."""
        reasons: Mapping[str, str] = getattr(type(self.inner), "excused", {})
        return reasons.get(law)

    def close(self) -> None:
        """Closes the shared environment."""
        if "env" in self.__dict__:
            self.env.close()

    def _echo(self, task: Task) -> Played:
        observation, _ = self.env.reset(seed=0, options={"task": task})
        script = [{"role": "assistant", "content": text_of(observation[-1].get("content")) if observation else ""}]
        return play_script(self.env, script, task, repeat=True)

    def _once(self, kind: str, task: Task, play: Callable[[], Played]) -> Played:
        key = (kind, task.id)
        if key not in self._played:
            self._played[key] = play()
        return self._played[key]


def opened(subject: Subject) -> closing[Env]:
    """Another environment for a `with` statement."""
    return closing(subject.make())
