"""One environment and its client's messages: a message in, an answer out. Runs in the environment's own process.

A fault of the environment is an error for the client and ends the episode, never a reward of 0; the session goes on with the next reset.
Waits for the environment.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from palestra.envs.core import MessageEnv
from palestra.envs.spaces import Observation, is_message
from palestra.envs.types import Message, StopReason
from palestra.server.env_host import wire
from palestra.server.env_host.types import EXECUTION_ERROR, SESSION_ERROR, UNKNOWN_TYPE, EnvRefusal, Served

logger = logging.getLogger(__name__)


class Session:
    """`answer` is called with each message in turn."""

    def __init__(self, env: gym.Env[Observation, Message], served: Served) -> None:
        """
        Raises:
            TypeError: `env` is no `MessageEnv`.
        """
        inner = env.unwrapped
        if not isinstance(inner, MessageEnv):
            raise TypeError(f"only a MessageEnv can be served, and {served.env_id} is a {type(inner).__name__}")
        self._env, self._inner, self._served = env, inner, served
        self._episode_id: str | None = None
        self.steps = 0
        """Since the start."""
        self._answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "reset": self._reset,
            "step": self._step,
            "state": self._state,
            "finish": self._finish,
            "grade": self._grade,
        }

    def answer(self, raw: bytes) -> bytes | None:
        """The answer to one message; None where the client closes the session.

        Raises:
            MemoryError: the process has reached its limit, and can no longer be relied on.
        """
        try:
            kind, data = wire.read_message(raw)
            if kind == "close":
                return None
            known = self._answers.get(kind)
            if known is None:
                raise EnvRefusal(f"Unknown message type: {kind[:100]}", 422, UNKNOWN_TYPE)
            return wire.write_json(known(data))
        except EnvRefusal as refusal:
            return wire.write_json(wire.failed(refusal))
        except gym.error.ResetNeeded as error:
            return wire.write_json(wire.failed(EnvRefusal(str(error), 409, SESSION_ERROR)))
        except Exception as error:  # whatever an environment raises is its fault, and its client's to know
            if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
                raise MemoryError from error
            logger.exception("%s failed", self._served.env_id)
            self._inner.done = True
            said = EnvRefusal(f"{type(error).__name__}: {error}"[:2000], 500, EXECUTION_ERROR)
            return wire.write_json(wire.failed(said))

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed, options, episode = wire.read_reset(data)
        if isinstance(options.get("task"), int):
            try:
                self._inner.task_of(options["task"])
            except ValueError as error:
                raise wire.invalid(str(error)) from None
        messages, info = self._env.reset(seed=seed, options=options)
        self._episode_id = episode or uuid.uuid4().hex
        return wire.observation(messages, None, (False, False), info["step"], self._inner.tool_specs())

    def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        action = wire.read_action(data)
        if not is_message(action, ("assistant",)):
            raise wire.invalid("an action's message must be an assistant message: role, content, tool_calls")
        self._playing()
        messages, reward, terminated, truncated, info = self._env.step(action)
        self.steps += 1
        return wire.observation(messages, float(reward), (terminated, truncated), info["step"])

    def _finish(self, data: Mapping[str, Any]) -> dict[str, Any]:
        reason = wire.read_reason(data, StopReason.MAX_TURNS)
        self._playing()
        score, info = self._inner.finish(reason)
        return wire.observation((), score, (False, True), info["step"])

    def _grade(self, data: Mapping[str, Any]) -> dict[str, Any]:
        reason, transcript = wire.read_reason(data, StopReason.ANSWER), data.get("transcript")
        if not isinstance(transcript, list) or not all(is_message(message) for message in transcript):
            raise wire.invalid("'transcript' must be a list of messages")
        self._playing()
        info = self._inner.grade(transcript, reason=reason)
        return wire.observation((), info.reward.value if info.reward else None, (True, False), info)

    def _playing(self) -> None:
        if self._inner.done:
            raise EnvRefusal("no episode is going on: reset first", 409, SESSION_ERROR)

    def _state(self, data: Mapping[str, Any]) -> dict[str, Any]:
        inner = self._inner
        said = {
            "episode_id": self._episode_id, "step_count": inner.turn, "done": inner.done,
            "task_id": inner.task.id if inner.task is not None else None,
            "palestra": {"env": self._served.env_id, "tasks": len(inner.tasks), "tools": inner.tool_specs()},
        }  # fmt: skip
        return {"type": "state", "data": said}
