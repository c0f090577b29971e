"""The contract of message environments, spaces and the wrapper that scores truncated episodes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import pytest

from palestra.envs.core import MessageEnv, Response, name_calls
from palestra.envs.spaces import AssistantSpace, MessagesSpace, fresh, sample_json
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import EnvError, Message, Reward, StepInfo, StopReason, Task
from palestra.envs.wrappers import ScoreTruncated

SAY: Message = {"role": "assistant", "content": "yes"}


class Guess(MessageEnv):
    """Gives 0.25 for each try and ends at "yes"."""

    system = "Guess."
    tasks = (Task("one?", "yes", "t1"), Task("two?", "yes", "t2"))
    hint: Message = {"role": "user", "content": "no"}  # noqa: RUF012 - shared on purpose: what comes out must be a copy

    def respond(self, action: Message) -> Response:
        stop = StopReason.ANSWER if action["content"] == "yes" else None
        return Response([] if stop else [self.hint], stop, reward=0.25)

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        right = bool(transcript) and transcript[-1]["content"] == task.answer
        return Reward(float(right), {"right": float(right)}, "judged")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


class TestEpisode:
    def test_step_rewards_and_the_score_add_up(self) -> None:
        env = Guess()
        env.reset(seed=0, options={"task": 1})
        _, first, ended, truncated, info = env.step(say("maybe"))
        assert (first, ended, truncated, info["step"].step_reward, info["step"].reward) == (
            0.25,
            False,
            False,
            0.25,
            None,
        )
        observation, last, ended, truncated, info = env.step(SAY)
        assert (observation, ended, truncated) == ((), True, False)
        assert info["step"] == StepInfo(
            "t2", 2, StopReason.ANSWER, Reward(1.5, {"right": 1.0}, "judged"), step_reward=0.25
        )
        assert first + last == info["step"].reward.value == 1.5

    def test_returned_messages_are_nobodys_but_the_callers(self) -> None:
        env = Guess()
        prompt, _ = env.reset(seed=0, options={"task": 0})
        action = say("maybe")
        observation, *_ = env.step(action)
        before = copy.deepcopy(env.transcript)
        prompt[1]["content"] = observation[0]["content"] = action["content"] = "changed"
        assert env.transcript == before
        assert env.step(say("again"))[0] == ({"role": "user", "content": "no"},)
        assert env.reset(seed=0, options={"task": 0})[0][1]["content"] == "one?"

    def test_a_prompt_of_messages_keeps_its_examples_and_its_own_system_message(self) -> None:
        env = Guess()
        shown = (
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "?"},
        )
        observation, _ = env.reset(options={"task": Task(shown, id="x")})
        assert [item["role"] for item in observation] == ["system", "user", "assistant", "user"]
        own = ({"role": "system", "content": "mine"}, *shown)
        observation, _ = env.reset(options={"task": Task(own, id="x")})
        assert observation == own
        assert observation in env.observation_space

    @pytest.mark.parametrize("option", [{"tasks": 0}, {"task": "t1"}, {"task": True}, {"task": 2}, {"task": -1}])
    def test_wrong_reset_options_are_refused(self, option: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="task"):
            Guess().reset(options=option)

    def test_an_environment_without_tasks_says_so(self) -> None:
        with pytest.raises(ValueError, match="no tasks of its own"):
            MessageEnv().reset(seed=0)

    @pytest.mark.parametrize(
        "action", ["yes", None, {"role": "user", "content": "yes"}, {"role": "assistant", "content": 5}]
    )
    def test_what_is_no_assistant_message_is_the_callers_bug(self, action: Any) -> None:
        env = Guess()
        env.reset(seed=0)
        with pytest.raises(ValueError, match="assistant message"):
            env.step(action)

    def test_steps_outside_an_episode_are_refused(self) -> None:
        env = Guess()
        for refused in (lambda: env.step(SAY), lambda: env.finish(StopReason.DEADLINE)):
            with pytest.raises(gym.error.ResetNeeded):
                refused()
        env.reset(seed=0)
        env.step(SAY)
        with pytest.raises(gym.error.ResetNeeded):
            env.step(SAY)

    def test_a_limit_from_outside_is_scored_with_what_there_is(self) -> None:
        env = Guess()
        env.reset(seed=0, options={"task": 0})
        env.step(say("maybe"))
        score, info = env.finish(StopReason.DEADLINE)
        assert score == 0.0
        assert info["step"].reward == Reward(0.25, {"right": 0.0}, "judged")
        assert info["step"].stop_reason is StopReason.DEADLINE

    def test_render_shows_the_conversation(self) -> None:
        env = Guess(render_mode="ansi")
        env.reset(seed=0, options={"task": 0})
        env.step(say("maybe"))
        assert env.render() == "[system] Guess.\n[user] one?\n[assistant] maybe\n[user] no"

    def test_calls_without_ids_get_them_in_a_copy(self) -> None:
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": {}}, {"id": "own", "function": {}}]}
        named = name_calls(message, 3)
        assert [call["id"] for call in named["tool_calls"]] == ["call_3_0", "own"]
        assert "id" not in message["tool_calls"][0]
        assert name_calls(named, 4) == named


class Broken(Guess):
    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.outcome = outcome

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome  # type: ignore[no-any-return]


class TestUnknownRewards:
    @pytest.mark.parametrize(
        ("outcome", "note"),
        [
            (RuntimeError("the judge is down"), "RuntimeError: the judge is down"),
            (math.nan, "nan"),
            (math.inf, "inf"),
            (Reward(math.nan, {"a": 1.0}), "nan"),
            (Reward(None, note="the sandbox died"), "the sandbox died"),
            ("seven", "ValueError"),
        ],
    )
    def test_a_graders_fault_is_never_a_zero(self, outcome: Any, note: str) -> None:
        env = Broken(outcome)
        env.reset(seed=0)
        _, reward, ended, _, info = env.step(SAY)
        assert ended
        assert math.isnan(reward)
        assert info["step"].reward.value is None
        assert note in info["step"].reward.note

    def test_an_unknown_step_reward_makes_the_whole_unknown(self) -> None:
        class Dim(Guess):
            def respond(self, action: Message) -> Response:
                response = super().respond(action)
                return Response(response.messages, response.stop, None if self.turn == 1 else 0.25)

        env = Dim()
        env.reset(seed=0)
        _, reward, _, _, info = env.step(say("maybe"))
        assert math.isnan(reward)
        assert info["step"].step_reward is None
        _, _, _, _, info = env.step(SAY)
        assert info["step"].reward.value is None

    @pytest.mark.parametrize("hook", ["setup", "respond"])
    def test_a_fault_in_a_hook_is_an_env_error_and_ends_the_episode(self, hook: str) -> None:
        class Faulty(Guess):
            pass

        def fail(*_: Any) -> Any:
            raise ConnectionError("the sandbox died")

        setattr(Faulty, hook, fail)
        env = Faulty()

        def run() -> None:
            env.reset(seed=0)
            env.step(SAY)

        with pytest.raises(EnvError, match=f"{hook}: ConnectionError: the sandbox died"):
            run()
        with pytest.raises(gym.error.ResetNeeded):
            env.step(SAY)

    def test_an_env_error_keeps_its_own_words(self) -> None:
        class Faulty(Guess):
            def respond(self, action: Message) -> Response:
                raise EnvError("no box is left")

        env = Faulty()
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"^no box is left$"):
            env.step(SAY)


class Looker(ToolEnv):
    tasks = (Task("look", None, "t"),)

    @tool
    def look(self) -> str:
        """Look."""
        return "a wall"

    def score(self, task: Task, transcript: Sequence[Message]) -> float:
        return 0.5 * len(self.calls)


LOOK: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "look"}}]}


class TestTruncation:
    def limited(self, steps: int) -> Any:
        return ScoreTruncated(gym.wrappers.TimeLimit(Looker(), steps))

    def test_a_time_limit_is_scored(self) -> None:
        env = self.limited(2)
        env.reset(seed=0)
        asked = {**LOOK, "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]}
        assert env.step(asked)[1:4] == (0.0, False, False)
        _, reward, terminated, truncated, info = env.step(asked)
        assert (reward, terminated, truncated) == (1.0, False, True)
        assert info["step"].reward == Reward(1.0)
        assert info["step"].stop_reason is StopReason.MAX_TURNS

    def test_an_answer_on_the_last_allowed_step_is_an_answer(self) -> None:
        env = self.limited(1)
        env.reset(seed=0)
        _, _, terminated, truncated, info = env.step(SAY)
        assert (terminated, truncated) == (True, False)
        assert info["step"].stop_reason is StopReason.ANSWER


class TestSpaces:
    def test_equal_by_value_and_picklable(self) -> None:
        tools = Looker().tool_specs()
        for space in (MessagesSpace(), AssistantSpace(tools)):
            assert pickle.loads(pickle.dumps(space)) == space
        assert AssistantSpace(tools) != AssistantSpace()
        assert MessagesSpace() != MessagesSpace(roles=("user",))

    def test_samples_are_members_and_repeat_with_their_seed(self) -> None:
        first, second = (AssistantSpace(Looker().tool_specs(), seed=4) for _ in range(2))
        for _ in range(20):
            sample = first.sample()
            assert sample in first
            assert sample == second.sample()
        assert MessagesSpace(seed=1).sample() in MessagesSpace()

    def test_every_kind_of_schema_is_sampled(self) -> None:
        schema = {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/P"}},
                "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "c": {"enum": ["x", "y"]},
                "d": {"type": "boolean"},
                "e": {},
            },
            "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        }
        rng = AssistantSpace(seed=0).np_random
        for _ in range(20):
            value = sample_json(schema, rng)
            assert set(value) == set("abcde")
            assert all(isinstance(item["x"], int) for item in value["a"])
            assert value["c"] in ("x", "y")

    def test_fresh_shares_no_container(self) -> None:
        value = {"a": [{"b": ({"c": 1},)}]}
        other = fresh(value)
        other["a"][0]["b"][0]["c"] = 2
        assert value == {"a": [{"b": ({"c": 1},)}]}
