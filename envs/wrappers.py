"""Wrappers that every registered environment gets."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym

from palestra.envs.core import MessageEnv
from palestra.envs.spaces import Observation
from palestra.envs.types import Message, StopReason


class ScoreTruncated(
    gym.Wrapper[Observation, Message, Observation, Message], gym.utils.RecordConstructorArgs
):  # the order is gymnasium's own, see its TimeLimit
    """Scores an episode that a limit outside the environment cut.

    gymnasium's TimeLimit truncates without telling the environment, whose score would be lost. Registered as an
    additional wrapper, this one stands outside of it. An answer on the last allowed step is an answer: terminated, not
    truncated.
    """

    def __init__(self, env: gym.Env[Observation, Message]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        inner = self.env.unwrapped
        value = math.nan if reward is None else float(reward)
        if truncated and not terminated and isinstance(inner, MessageEnv) and not inner.done:
            score, info = inner.finish(StopReason.MAX_TURNS)
            value += score
        return observation, value, bool(terminated), bool(truncated and not terminated), info
