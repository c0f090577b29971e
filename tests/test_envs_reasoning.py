"""`palestra/ReasoningGym-v0`: its suite, seeds, scoring of hostile answers, and all datasets of the package."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.reasoning import ReasoningGym, extract, puzzles
from palestra.envs.registry import register_builtin
from palestra.envs.rubrics import procedural
from palestra.envs.rubrics.procedural import is_arithmetic
from palestra.envs.rubrics.processes import MAX_CHARACTERS, close_workers, killable
from palestra.envs.types import EnvError, Reward
from tests.conformance.env_suite import EnvSuite

register_builtin("palestra/ReasoningGym-v0", "palestra.envs.reasoning:ReasoningGym")

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Datasets whose entries come without an answer: any that fits is scored."""


@pytest.fixture(scope="module", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.mark.walk
class TestLegs(EnvSuite):
    env_id = "palestra/ReasoningGym-v0"


def reward_of(env: ReasoningGym, text: str, task: int = 0) -> Reward:
    return play(env, ScriptedPolicy([text]), Limits(), task=task, seed=0).reward


class TestReading:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("<answer>5</answer>", "5"),
            ("so <answer>\n a\nb \n</answer>.", "a\nb"),
            ("<answer>1</answer> no: <answer>2</answer>", "2"),
            ("<answer>1</answer> no: <answer>2", None),
            ("<answer><answer>3</answer></answer>", "3"),
            ("<answer> </answer>", None),
            ("</answer>5<answer>", None),
            ("5", None),
            ("", None),
            ("<answer>" * 10_000_000, None),
            ("<answer>5</answer>" + " " * MAX_CHARACTERS, None),
        ],
    )
    def test_the_last_answer_wins_and_must_be_closed(self, text: str, answer: str | None) -> None:
        assert extract(text) == answer

    @pytest.mark.parametrize(
        "text",
        [
            "3*(4 - 1)/2",
            "-5*X**9 + C",
            "sin(x)*exp(2*x) + log(x) - sqrt(2)/pi",
            "x^2",
            "1.5 * 2.",
            "",
            "9**9**9",
            "E + I",
        ],
    )
    def test_arithmetic(self, text: str) -> None:
        assert is_arithmetic(text)

    @pytest.mark.parametrize(
        "text",
        ["__import__('os')", "exec(chr(105))", "x.func", "(1).real", "1 .real", "x. y", "eval(x)", "lambda: x", "[1]", "'a'", "x_1",
         "open(x)", "entry", "srepr(x)", "input()", "f(x) if x else y", "x;y", "{x}", "x@y", "\uff45xec(x)", "1!", "x=1"],
    )  # fmt: skip
    def test_what_could_do_more_than_compute_is_not_arithmetic(self, text: str) -> None:
        assert not is_arithmetic(text)


class TestArguments:
    def test_seeds_and_sizes_have_bounds(self) -> None:
        for wrong in ({"seed": -1}, {"seed": procedural.MAX_SEED}, {"size": 0}, {"size": procedural.SEED_STEP + 1}):
            with pytest.raises(ValueError, match="a seed lies in"):
                puzzles(**{"dataset": "leg_counting", "seed": 0, "size": 1, "config": "{}", **wrong})

    def test_without_the_package_it_says_how_to_have_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(procedural.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EnvError, match=r"pip install 'palestra\[reasoning\]'"):
            ReasoningGym()

    def test_only_the_scorers_that_we_know_evaluate_a_text(self) -> None:
        """A later version of the package with another one has to be looked at."""
        found = importlib.util.find_spec("reasoning_gym")
        assert found is not None
        assert found.origin is not None
        evaluating = {
            path.stem
            for path in Path(found.origin).parent.rglob("*.py")
            if re.search(r"\b(eval|exec|parse_expr|sympify)\(", path.read_text())
        }
        lists = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
        of_their_own_text = {"codeio", "number_sorting", "generators_00_49", "generators_50_99", "bitwise_arithmetic",
                             "basic_arithmetic", "propositional_logic"}  # fmt: skip
        assert evaluating == lists | set(procedural._EVALUATED) | of_their_own_text


@pytest.mark.walk
class TestDatasets:
    @pytest.mark.parametrize(
        "dataset", ["leg_counting", "spiral_matrix", "countdown", "polynomial_multiplication", "word_ladder"]
    )
    def test_an_answer_of_the_package_is_right_and_none_is_worth_nothing(self, dataset: str) -> None:
        env = ReasoningGym(dataset, seed=2, size=50)
        for index in (0, 49):
            (answer,) = env.oracle(env.tasks[index])
            assert reward_of(env, answer["content"], index).value == pytest.approx(1.0)
            assert reward_of(env, "", index).value == 0.0
            assert reward_of(env, env.tasks[index].prompt, index).value == 0.0

    def test_wrong_names_and_settings_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"nope.*there are \d+: ab, acre"):
            ReasoningGym("nope")
        with pytest.raises(ValueError, match="legs"):
            ReasoningGym(config={"legs": 3})

    def test_a_mixture(self) -> None:
        parts = [{"name": "leg_counting"}, {"name": "countdown", "weight": 3.0}]
        env = ReasoningGym("composite", config={"datasets": parts})
        assert len({env.tasks[index].prompt.split()[0] for index in range(20)}) > 1
        for index in range(6):
            (answer,) = env.oracle(env.tasks[index])
            assert reward_of(env, answer["content"], index).value == 1.0

    @pytest.mark.parametrize(
        ("dataset", "answer"),
        [
            ("spiral_matrix", "__import__('os').abort()"),
            ("string_insertion", "oracle_answer"),
            ("binary_matrix", "[[int(x) for x in r.split()] for r in oracle_answer.splitlines()]"),
            ("n_queens", "[r.split() for r in valid_solutions[0].splitlines()]"),
            ("countdown", "__import__('os').abort()"),
            ("countdown", "exec(chr(105))"),
        ],
    )
    def test_an_answer_is_no_program(self, dataset: str, answer: str) -> None:
        reward = reward_of(ReasoningGym(dataset), f"<answer>{answer}</answer>")
        assert (reward.value, dict(reward.errors)) == (0.0, {})

    def test_a_scorer_that_does_not_come_back_is_killed(self) -> None:
        reward = reward_of(ReasoningGym("puzzle24", timeout_s=1.0), "<answer>9**9**9**9</answer>")
        assert (reward.value, dict(reward.errors)) == (None, {"score": "score was killed after 1 s"})

    def test_a_task_of_another_version_is_a_fault(self) -> None:
        env = ReasoningGym()
        env.reset(options={"task": 0})
        assert env.task is not None
        assert isinstance(env.task.prompt, str)
        other = type(env.task)(env.task.prompt + "!", env.task.answer, env.task.id, env.task.meta)
        env.reset(options={"task": other})
        info = env.step({"role": "assistant", "content": "<answer>500</answer>"})[4]["step"]
        assert info.reward.value is None
        assert "another version" in info.reward.errors["score"]

    def test_seeds_share_no_tasks_and_a_process_changes_none(self) -> None:
        """reasoning-gym's own seeds 0 and 1 share all but one entry; some of its datasets follow the order of a set."""
        first, second = (ReasoningGym("isomorphic_strings", seed=seed, size=20) for seed in (0, 1))
        prompts = [[env.tasks[index].prompt for index in range(20)] for env in (first, second)]
        assert not set(prompts[0]) & set(prompts[1])
        code = (
            "from palestra.envs.reasoning import ReasoningGym\n"
            "tasks = ReasoningGym('isomorphic_strings', size=20).tasks\n"
            "print([tasks[index].prompt for index in range(20)])\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, cwd="/", check=True
        )
        assert done.stdout.strip() == str(prompts[0])

    def test_the_second_environment_is_made_at_once(self) -> None:
        assert ReasoningGym().tasks is ReasoningGym().tasks
        assert ReasoningGym().rubric is ReasoningGym().rubric


def every_dataset() -> list[str]:
    names = killable(procedural.dataset_names, timeout_s=120.0)()
    assert isinstance(names, list), names
    return names


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_every_dataset_scores_its_own_answers_with_one_and_none_with_nothing() -> None:
    names = every_dataset()
    assert len(names) >= 106
    wrong: dict[str, Any] = {}
    for name in names:
        config = {"datasets": [{"name": "leg_counting"}]} if name == "composite" else None
        try:
            env = ReasoningGym(name, size=4, config=config, timeout_s=120.0)
        except ValueError as error:
            wrong[name] = str(error)
            continue
        for index in (0, 3):
            task = env.tasks[index]
            assert reward_of(env, "", index).value == 0.0
            if task.answer is None:
                assert name in WITHOUT_ANSWER
                continue
            reward = reward_of(env, env.oracle(task)[0]["content"], index)
            if reward.value != pytest.approx(1.0):
                wrong[name] = reward
    print(wrong)
    # A package without one of its data files cannot make these two.
    assert {name for name in wrong if "anagrams.jsonl" not in str(wrong[name])} == set()
