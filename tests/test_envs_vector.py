"""Environments in gymnasium's vector classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import palestra.envs  # noqa: F401 - registers the ids
from palestra.envs import background
from palestra.envs.calculator import calls
from palestra.envs.registry import register
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import Message, Reward, StepInfo, Task

ID = "palestra/Calculator-v0"


@register("tests/Slow-v0")
class Slow(ToolEnv):
    """Its tool is asynchronous: it needs the loop thread."""

    tasks = tuple(Task(f"task {number}", None, f"t{number}") for number in range(50))

    @tool
    async def wait(self) -> str:
        """Wait."""
        return "done"

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return Reward(None, note="unknown") if transcript[-1]["content"] == "?" else 1.0


WAIT: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "w", "function": {"name": "wait", "arguments": "{}"}}],
}


def ids(info: dict[str, Any]) -> list[str]:
    return [step.task_id for step in info["step"]]


def test_synchronous_vectors_draw_different_tasks_and_share_options() -> None:
    env: Any = gym.make_vec(ID, num_envs=3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "Disabled"})
    observations, info = env.reset(seed=7)
    assert len(observations) == 3
    assert len(set(ids(info))) == 3
    assert ids(env.reset()[1]) != ids(info)
    task = Task("What is 2 plus 2?", 4, "mine")
    observations, info = env.reset(options={"task": task})
    assert ids(info) == ["mine"] * 3
    observations, _, terminated, truncated, info = env.step(
        [calls("2+2")] * 2 + [{"role": "assistant", "content": "4"}]
    )
    assert [len(item) for item in observations] == [1, 1, 0]
    assert terminated.tolist() == [False, False, True]
    assert not truncated.any()
    assert all(isinstance(step, StepInfo) for step in info["step"])
    env.close()


def test_the_next_step_after_an_end_resets_and_ignores_the_action() -> None:
    env: Any = gym.make_vec(ID, num_envs=1)
    env.reset(seed=0)
    _, _, terminated, _, _ = env.step([{"role": "assistant", "content": "4"}])
    assert terminated.all()
    observations, rewards, terminated, _, info = env.step([calls("1+1")])
    assert observations[0][-1]["role"] == "user"
    assert (rewards[0], terminated[0], info["step"][0].turn) == (0.0, False, 0)
    env.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_asynchronous_vectors_step_tool_environments_after_the_loop_was_used(context: str) -> None:
    async def touch() -> int:
        return 1

    assert background.call(touch(), 5) == 1
    kwargs = {"shared_memory": False, "context": context}
    env: Any = gym.make_vec("tests/Slow-v0", num_envs=2, vectorization_mode="async", vector_kwargs=kwargs)
    try:
        _, info = env.reset(seed=3)
        assert len(set(ids(info))) == 2
        env.step_async([WAIT, WAIT])
        observations, *_ = env.step_wait(timeout=60)
        assert [item[0]["content"] for item in observations] == ["done", "done"]
        env.step_async([{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "?"}])
        _, rewards, terminated, _, info = env.step_wait(timeout=60)
        assert terminated.all()
        assert rewards[0] == 1.0
        assert math.isnan(rewards[1])
        assert rewards.dtype == np.float64
        assert info["step"][1].reward == Reward(None, {}, "unknown")
    finally:
        env.close(timeout=30)
