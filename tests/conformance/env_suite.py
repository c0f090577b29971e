"""What every environment keeps: gymnasium's contract, the laws of a grader, and answers to whatever a model may write.

Subclass `EnvSuite` and give `env_id` and `args`; an environment without an oracle overrides `oracle`.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.core import MessageEnv
from palestra.envs.registry import make_env
from palestra.envs.spaces import is_message
from palestra.envs.types import Episode, Message, StopReason, Task

FUZZED: list[Message] = [
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "\u2028 \U0001f600 \x00 <|im_end|> " * 50},
    {"role": "assistant", "content": [{"type": "text", "text": "parts"}], "reasoning_content": "hm"},
    {"role": "assistant", "content": "x", "tool_calls": []},
    {"role": "assistant", "content": "", "tool_calls": [{}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": None}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": None, "arguments": 5}}]},
]


class EnvSuite:
    env_id: str
    args: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    tasks_checked = 5

    @pytest.fixture
    def env(self) -> Any:
        env = make_env(self.env_id, self.args)
        yield env
        env.close()

    @pytest.fixture
    def inner(self, env: Any) -> MessageEnv:
        return env.unwrapped

    def oracle(self, inner: MessageEnv, task: Task) -> list[Message]:
        return inner.oracle(task)

    def episode(self, env: Any, task: Task, script: list[Message | str]) -> Episode:
        return play(env, ScriptedPolicy(script), Limits(max_turns=6), task=task, seed=0)

    def some_tasks(self, inner: MessageEnv) -> list[Task]:
        size = len(inner.tasks)
        return [inner.tasks[index * size // self.tasks_checked] for index in range(min(self.tasks_checked, size))]

    def test_gymnasium_checks_it_without_a_warning(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = gym.make(self.env_id, **self.args)
            check_env(env.unwrapped)
            env.reset(seed=3)
            env.step(env.action_space.sample())
            env.close()

    def test_the_first_observation_is_a_prompt_of_fresh_messages(self, env: Any, inner: MessageEnv) -> None:
        first, info = env.reset(seed=1)
        again, _ = env.reset(seed=1)
        assert first == again
        assert all(is_message(message) for message in first)
        assert info["step"].task_id
        first[-1]["content"] = "changed"
        assert env.reset(seed=1)[0] == again

    def test_seeds_choose_tasks_and_the_stream_goes_on(self, env: Any) -> None:
        drawn = [env.reset(seed=5)[1]["step"].task_id] + [env.reset()[1]["step"].task_id for _ in range(7)]
        again = [env.reset(seed=5)[1]["step"].task_id] + [env.reset()[1]["step"].task_id for _ in range(7)]
        assert drawn == again
        assert len(set(drawn)) > 1

    def test_unknown_reset_options_are_refused(self, env: Any) -> None:
        with pytest.raises(ValueError, match="tasks"):
            env.reset(options={"tasks": 1})

    def test_the_oracle_scores_one_and_the_sum_of_step_rewards_is_the_reward(self, env: Any, inner: MessageEnv) -> None:
        for task in self.some_tasks(inner):
            env.reset(options={"task": task})
            total, ended = 0.0, False
            for message in self.oracle(inner, task):
                _, reward, ended, truncated, info = env.step(message)
                total += reward
                assert not truncated
            assert ended
            assert info["step"].reward.value == pytest.approx(1.0)
            assert total == pytest.approx(info["step"].reward.value)

    def test_an_empty_answer_and_the_prompt_played_back_score_nothing(self, env: Any, inner: MessageEnv) -> None:
        for task in self.some_tasks(inner):
            question = env.reset(options={"task": task})[0][-1]["content"]
            assert self.episode(env, task, [""]).reward.value == 0.0
            assert self.episode(env, task, [question]).reward.value == 0.0

    def test_the_answer_of_another_task_is_wrong(self, env: Any, inner: MessageEnv) -> None:
        for task, other in itertools.pairwise(self.some_tasks(inner)):
            if task.answer != other.answer:
                assert self.episode(env, task, self.oracle(inner, other)).reward.value < 0.5

    def test_the_same_episode_is_scored_the_same_twice(self, env: Any, inner: MessageEnv) -> None:
        task = inner.tasks[0]
        first, second = (self.episode(env, task, self.oracle(inner, task)) for _ in range(2))
        assert (first.reward, first.messages) == (second.reward, second.messages)

    def test_task_ids_are_unique_and_indexing_is_deterministic(self, inner: MessageEnv) -> None:
        size = min(len(inner.tasks), 500)
        assert len({inner.tasks[index].id for index in range(size)}) == size
        assert inner.tasks[0] == inner.tasks[0]
        with pytest.raises(ValueError, match="no task"):
            inner.task_of(len(inner.tasks))

    def test_tasks_are_json(self, inner: MessageEnv) -> None:
        for task in self.some_tasks(inner):
            json.dumps([task.prompt, task.answer, task.id, dict(task.meta)])

    @pytest.mark.parametrize("message", FUZZED)
    def test_whatever_a_model_writes_is_answered(self, env: Any, message: Message) -> None:
        env.reset(seed=0)
        observation, reward, ended, _, info = env.step(message)
        assert math.isfinite(reward)
        assert ended or len(observation) == len(message["tool_calls"])
        assert info["step"].turn == 1

    def test_random_actions_never_break_it(self, env: Any) -> None:
        env.action_space.seed(0)
        for seed in range(30):
            env.reset(seed=seed)
            for _ in range(4):
                observation, reward, ended, _, _ = env.step(env.action_space.sample())
                assert observation in env.observation_space
                assert math.isfinite(reward)
                if ended:
                    break

    def test_a_step_after_the_end_is_refused(self, env: Any, inner: MessageEnv) -> None:
        env.reset(seed=0)
        inner.finish(StopReason.DEADLINE)
        with pytest.raises(gym.error.ResetNeeded):
            inner.step({"role": "assistant", "content": "more"})

    def test_a_time_limit_is_scored(self, inner: MessageEnv) -> None:
        env = gym.make(self.env_id, max_episode_steps=1, disable_env_checker=True, **self.args)
        env.reset(seed=0)
        calls = [
            {"id": "c", "type": "function", "function": {"name": spec["function"]["name"], "arguments": "{}"}}
            for spec in inner.tool_specs()[:1]
        ]
        _, reward, terminated, truncated, info = env.step({"role": "assistant", "content": "", "tool_calls": calls})
        assert (terminated, truncated) == (not calls, bool(calls))
        assert info["step"].stop_reason is (StopReason.MAX_TURNS if calls else StopReason.ANSWER)
        assert info["step"].reward.value == pytest.approx(reward)
        env.close()
