"""`palestra/Calculator-v0`: its suite, its reward, its arithmetic, and the transcripts that teach it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.arithmetic import LEVELS, evaluate, make_expression, spoken
from palestra.envs.calculator import EXAMPLE, Calculator, arithmetic_tasks, calls, read_answer
from palestra.envs.demonstrations import demonstrations
from palestra.envs.types import Message, Reward, StopReason, Task
from tests.conformance.env_suite import EnvSuite


class TestOneShot(EnvSuite):
    env_id = "palestra/Calculator-v0"


class TestPlainAtAllLevels(EnvSuite):
    env_id = "palestra/Calculator-v0"
    args = {"levels": LEVELS, "prompt": "plain", "size": 400, "seed": 3}  # noqa: RUF012


TASK = Task("What is 12 plus 30?", 42, "t", {"expression": "12+30"})


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def reward_of(*script: Message, task: Task = TASK, turns: int = 6) -> Reward:
    return play(Calculator(), ScriptedPolicy(script), Limits(max_turns=turns), task=task, seed=0).reward


class TestReward:
    @pytest.mark.parametrize(
        ("script", "value", "earned"),
        [
            ((calls("12+30"), say("42")), 1.0, {"valid_call", "right_call", "right_answer"}),
            ((calls("30 + 12"), say("The answer is 42.")), 1.0, {"valid_call", "right_call", "right_answer"}),
            ((calls("12+31"), say("42")), 0.7, {"valid_call", "right_answer"}),
            ((calls("12+31"), say("43")), 0.2, {"valid_call"}),
            ((calls("12+30"), say("43")), 0.5, {"valid_call", "right_call"}),
            ((calls("12+30"), say("42 or 43")), 0.5, {"valid_call", "right_call"}),
            ((calls("12+30"), say("")), 0.5, {"valid_call", "right_call"}),
            ((say("42"),), 0.0, set()),
            ((say(""),), 0.0, set()),
            ((say("What is 12 plus 30?"),), 0.0, set()),
            ((calls("12+30", name="search"), say("42")), 0.0, set()),
            ((calls("twelve"), say("42")), 0.0, set()),
            ((calls("twelve"), calls("12+30"), say("42")), 1.0, {"valid_call", "right_call", "right_answer"}),
            ((calls("12+30"), calls("1+1"), say("42")), 0.7, {"valid_call", "right_answer"}),
            ((calls("12+30"), calls("twelve"), say("42")), 0.0, set()),
            ((say('{"name": "calculator", "arguments": {"expression": "12+30"}}'),), 0.0, set()),
        ],
    )
    def test_table(self, script: tuple[Message, ...], value: float, earned: set[str]) -> None:
        reward = reward_of(*script)
        assert reward.value == pytest.approx(value)
        assert {name for name, part in reward.components.items() if part} == earned
        assert set(reward.components) == {"valid_call", "right_call", "right_answer"}

    def test_a_call_beside_an_answer_is_no_answer(self) -> None:
        both = {**calls("12+30"), "content": "42"}
        reward = reward_of(both, turns=1)
        assert reward.value == pytest.approx(0.5)

    def test_the_example_of_the_prompt_earns_nothing(self) -> None:
        task = arithmetic_tasks()[0]
        lucky = Task(task.prompt, 42, "lucky", {"expression": "40+2"})
        env = Calculator()
        env.reset(options={"task": lucky})
        assert env.finish(StopReason.DEADLINE)[1]["step"].reward.value == 0.0
        assert reward_of(say("42"), task=lucky).value == 0.0

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("42", 42),
            (" -7 ", -7),
            ("42.", 42),
            ("the answer is 42", 42),
            ("The answer is -3.\n", -3),
            ("007", 7),
            ("", None),
            ("42 43", None),
            ("42.0", None),
            ("4,200", None),
            ("x42", None),
            ("\u0664\u0662", None),
            ("9" * 61, None),
            (" " * 500 + "1", None),
            (None, None),
            ([{"type": "text", "text": "42"}], None),
        ],
    )
    def test_answers(self, text: Any, value: int | None) -> None:
        assert read_answer(text) == value


class TestArithmetic:
    @pytest.mark.parametrize(
        ("text", "value"),
        [("12+30", 42), (" 2 * (3 - 5) ", -4), ("-3--4", 1), ("+5", 5), ("2+3*4", 14), ("(((7)))", 7), ("0", 0)],
    )
    def test_values(self, text: str, value: int) -> None:
        assert evaluate(text) == value

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "2**9",
            "1/2",
            "abs(1)",
            "__import__('os')",
            "1 2",
            "2(3)",
            "(1",
            "1+",
            "07+1",
            "1.5",
            "0x10",
            "1_0",
            "9" * 61,
            "*".join(["9" * 30] * 3),
            "(" * 100 + "1" + ")" * 100,
            "1+" * 100 + "1",
            "\n1",
            "\uff11+\uff11",
            "()",
        ],
    )
    def test_everything_else_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            evaluate(text)

    def test_agrees_with_python_on_random_expressions(self) -> None:
        for level in LEVELS:
            for index in range(200):
                expression = make_expression(11, index, level)
                assert evaluate(expression) == eval(expression)

    def test_questions_are_spoken(self) -> None:
        assert spoken("12+30") == "What is 12 plus 30?"
        assert spoken("(3-4)*(5+6)") == "What is (3 minus 4) times (5 plus 6)?"

    def test_levels_rise_along_the_sequence_and_seeds_differ(self) -> None:
        tasks = arithmetic_tasks(size=40, levels=(1, 2, 4))
        levels = [tasks[index].meta["level"] for index in range(40)]
        assert levels == sorted(levels)
        assert set(levels) == {1, 2, 4}
        assert tasks[0] != arithmetic_tasks(seed=1, size=40)[0]
        signs = [
            {sum(sign in "+-*" for sign in make_expression(0, index, level)) for index in range(50)} for level in LEVELS
        ]
        assert signs == [{1}, {1}, {2}, {3}]

    @pytest.mark.parametrize("wrong", [{"levels": ()}, {"levels": (5,)}, {"prompt": "two_shot"}, {"size": 0}])
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            arithmetic_tasks(**wrong)

    def test_the_one_shot_prompt_is_a_whole_example_and_the_question(self) -> None:
        prompt = arithmetic_tasks()[7].prompt
        assert [message["role"] for message in prompt] == ["system", "user", "assistant", "tool", "assistant", "user"]  # type: ignore[index]
        assert tuple(prompt[1:5]) == EXAMPLE
        assert read_answer(EXAMPLE[-1]["content"]) == evaluate("12+30")
        assert len(arithmetic_tasks(prompt="plain")[7].prompt) == 2


class TestDemonstrations:
    source = arithmetic_tasks(prompt="plain", size=500)

    def scores(self, noise: float, n: int) -> list[float | None]:
        """Each transcript's assistant messages, played for real."""
        out = []
        by_question = {self.source[index].prompt[-1]["content"]: self.source[index] for index in range(500)}  # type: ignore[index]
        for shown in demonstrations(self.source, n, noise, seed=1):
            script = [message for message in shown["messages"] if message["role"] == "assistant"]
            env = Calculator()
            limits = Limits(max_turns=len(script))
            task = by_question[shown["messages"][1]["content"]]
            episode = play(env, ScriptedPolicy(script), limits, task=task, seed=0)
            assert list(episode.messages)[: len(shown["messages"])] == shown["messages"]
            assert shown["messages"][-1]["role"] == "assistant"
            assert shown["tools"] == list(env.tool_specs())
            out.append(episode.reward.value)
        return out

    def test_without_noise_all_are_right(self) -> None:
        assert set(self.scores(0.0, 50)) == {1.0}

    def test_noise_spoils_calls_and_answers_in_its_share(self) -> None:
        scores = Counter(self.scores(0.3, 1000))
        assert 0.44 < scores[1.0] / 1000 < 0.55  # 0.7 * 0.7
        assert 0.16 < scores[0.5] / 1000 < 0.27  # 0.7 * 0.3
        assert 0.18 < scores[0.0] / 1000 < 0.30  # 0.3 * 4 / 5
        assert scores[0.2] > 0

    def test_only_noise_has_no_good_call(self) -> None:
        assert max(score or 0.0 for score in self.scores(1.0, 100)) <= 0.5

    def test_they_repeat_with_their_seed(self) -> None:
        assert demonstrations(self.source, 20, 0.3, seed=4) == demonstrations(self.source, 20, 0.3, seed=4)
        assert demonstrations(self.source, 20, 0.3, seed=4) != demonstrations(self.source, 20, 0.3, seed=5)
        with pytest.raises(ValueError, match="noise"):
            demonstrations(self.source, 1, 1.5)

    def test_the_global_generator_is_left_alone(self) -> None:
        random.seed(1)
        before = random.getstate()
        demonstrations(self.source, 5, 0.5)
        assert random.getstate() == before
