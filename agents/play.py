"""The play loop: one environment, one policy, one episode.

A task and a seed go in, an `Episode` comes out, whatever happens: a fault on the way is data with an unknown reward,
not an exception. It waits for the policy (which is given the time that is left) and for the environment's own tools.
"""

from __future__ import annotations

import logging
import time
import traceback

import gymnasium as gym

from palestra.agents.types import Limits, Policy, PolicyStop
from palestra.envs.core import MessageEnv, name_calls
from palestra.envs.spaces import Observation
from palestra.envs.types import Episode, Message, Reward, StepInfo, StopReason, Task

logger = logging.getLogger(__name__)

Env = gym.Env[Observation, Message]


def play(env: Env, policy: Policy, limits: Limits, *, task: Task | int, seed: int) -> Episode:
    """Plays `task` from reset to the end.

    - The environment ends it: terminated.
    - A limit, or the policy (`PolicyStop`), ends it: truncated, and scored with what there is.
    - Anything else that is raised: neither; `reward.value` is None, `stop_reason` INFRA, `error` says what and where.

    Raises:
        TypeError: `env` is no `MessageEnv`.
    """
    return _Run(env, message_env(env), policy, limits).episode(task, seed)


def message_env(env: Env) -> MessageEnv:
    """What is inside of all wrappers.

    Raises:
        TypeError: it is no `MessageEnv`.
    """
    inner = env.unwrapped
    if not isinstance(inner, MessageEnv):
        raise TypeError(f"an episode needs a MessageEnv, got {type(inner).__name__}")
    return inner


class _Run:
    """The state of one episode while it is played."""

    def __init__(self, env: Env, inner: MessageEnv, policy: Policy, limits: Limits) -> None:
        self.env, self.inner, self.policy, self.limits = env, inner, policy, limits
        self.messages: list[Message] = []
        self.step_rewards: list[float | None] = []
        self.info = StepInfo("", 0)
        self.tools = inner.tool_specs()

    def episode(self, task: Task | int, seed: int) -> Episode:
        started = time.monotonic()
        self.deadline = started + self.limits.deadline_s
        error, terminated = None, False
        try:
            terminated = self._play(task, seed)
        except Exception as fault:  # noqa: BLE001 - whatever user code raises, the episode is data
            error = describe(fault)
            logger.warning("an episode of task %r ended by a fault: %s", self.info.task_id or task, error)
        info, faulted = self.info, error is not None
        reward = Reward(None, note=error or "") if faulted else info.reward or Reward(None, note="never scored")
        return Episode(
            task_id=info.task_id or (task.id if isinstance(task, Task) else str(task)),
            messages=tuple(self.messages),
            tools=self.tools,
            reward=reward,
            step_rewards=tuple(self.step_rewards),
            stop_reason=StopReason.INFRA if faulted else info.stop_reason or StopReason.ENV_DONE,
            terminated=terminated,
            truncated=not terminated and not faulted,
            turns=len(self.step_rewards),
            tool_calls=info.tool_calls,
            tool_errors=info.tool_errors,
            error=error,
            seconds=time.monotonic() - started,
        )

    def _play(self, task: Task | int, seed: int) -> bool:
        """True where the environment ended it, False where a limit did."""
        observation, info = self.env.reset(seed=seed, options={"task": task})
        self.messages += observation
        self.info = info["step"]
        self.tools = self.inner.tool_specs()  # a task can bring tools of its own
        while True:
            left = self.deadline - time.monotonic()
            if self.info.turn >= self.limits.max_turns:
                return self._cut(StopReason.MAX_TURNS)
            if left <= 0:
                return self._cut(StopReason.DEADLINE)
            try:
                reply = self.policy.act(tuple(self.messages), self.tools, left)
            except PolicyStop as stop:
                return self._cut(stop.reason)
            if (ended := self._step(reply.message)) is not None:
                return ended

    def _step(self, message: Message) -> bool | None:
        """Plays one reply; None where the episode goes on."""
        action = name_calls(message, self.info.turn + 1)
        self.messages.append(action)
        self.step_rewards.append(None)  # a fault inside the step leaves it unknown
        observation, _, terminated, truncated, info = self.env.step(action)
        self.messages += observation
        self.info = info["step"]
        self.step_rewards[-1] = self.info.step_reward
        if terminated:
            return True
        if not truncated:
            return None
        return self._cut(StopReason.MAX_TURNS) if self.info.reward is None else False

    def _cut(self, reason: StopReason) -> bool:
        _, info = self.inner.finish(reason)
        self.info = info["step"]
        return False


def describe(fault: BaseException) -> str:
    """Type, message and the innermost frame of a fault and, where it was raised from another one, of that."""
    root, seen = fault, {id(fault)}
    while root.__cause__ is not None and id(root.__cause__) not in seen:  # `raise error from error` makes a ring
        root = root.__cause__
        seen.add(id(root))
    frames = traceback.extract_tb(root.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(fault).__name__}: {fault}{where}"


def infra_episode(
    task_id: str, fault: BaseException | str, like: Episode | None = None, seconds: float = 0.0
) -> Episode:
    """The episode of a rollout that could not be played or handed in: no reward, and the fault's text. `like` keeps
    what was played; `seconds`: how long it went on, where nothing is kept.
    """
    error = fault if isinstance(fault, str) else describe(fault)
    return Episode(
        task_id=task_id,
        messages=like.messages if like else (),
        tools=like.tools if like else (),
        reward=Reward(None, note=error),
        step_rewards=like.step_rewards if like else (),
        stop_reason=StopReason.INFRA,
        terminated=False,
        truncated=False,
        turns=like.turns if like else 0,
        tool_calls=like.tool_calls if like else 0,
        tool_errors=like.tool_errors if like else 0,
        error=error,
        seconds=like.seconds if like else seconds,
    )
