"""`palestra/Math-v0`: its suite, how answers are read, its problems, and texts that are meant to hang a grader."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.maths import FORMS, KINDS, MathEnv, latex, math_tasks, read_problems
from palestra.envs.registry import register_builtin
from palestra.envs.rubrics import symbolic
from palestra.envs.rubrics.processes import close_workers, worker_pids
from palestra.envs.rubrics.symbolic import last_box, too_much
from palestra.envs.types import EnvError, Reward, Task, TaskError
from tests.conformance.env_suite import EnvSuite

register_builtin("palestra/Math-v0", "palestra.envs.maths:MathEnv")


@pytest.fixture(scope="module", autouse=True)
def _workers_end() -> Iterator[None]:
    yield
    close_workers()


@pytest.mark.walk
class TestMath(EnvSuite):
    env_id = "palestra/Math-v0"
    tasks_checked = 11  # every kind, and neighbours of one kind


def reward_of(text: str, task: Task, timeout_s: float = 20.0) -> Reward:
    return play(MathEnv(timeout_s=timeout_s), ScriptedPolicy([text]), Limits(), task=task, seed=0).reward


class TestReading:
    @pytest.mark.parametrize(
        ("text", "box"),
        [
            (r"\boxed{5}", "5"),
            (r"so $\boxed{ \frac{1}{2} }$.", r"\frac{1}{2}"),
            (r"\boxed{1} no, \boxed{2}", "2"),
            (r"\boxed{\boxed{3}}", "3"),
            (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
            (r"\boxed{}", ""),
            (r"\boxed{1} and \boxed{2", None),
            (r"\boxed{\frac{1}{2}", None),
            (r"\boxed 5", None),
            ("boxed{5}", None),
            ("5", None),
            ("", None),
            ("\\boxed{5\\", None),
        ],
    )
    def test_the_last_box_wins_and_must_be_closed(self, text: str, box: str | None) -> None:
        assert last_box(text) == box

    def test_reading_takes_time_in_proportion(self) -> None:
        """A scan that began anew at each box would take minutes."""
        assert last_box(r"\boxed{" * 200_000) is None
        assert last_box(r"\boxed{" + "{" * 200_000 + "}" * 200_000) is None

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            ("", "empty"),
            ("1" * 301, "301 characters"),
            ("{" * 7 + "1" + "}" * 7, "7 brackets"),
            ("([{" * 3, "9 brackets"),
        ],
    )
    def test_caps(self, answer: str, text: str) -> None:
        assert text in str(too_much(answer))
        assert too_much(r"\frac{\sqrt{1 + (2 + (3 + 4))}}{2}") is None

    @pytest.mark.parametrize(
        ("text", "form"),
        [
            ("5", "number"),
            ("-5", "number"),
            ("+ 5", "number"),
            ("1,000,000", "number"),
            (".5", "number"),
            ("-0.25", "number"),
            ("3/4", "number"),
            (r"-\frac{3}{4}", "number"),
            (r"\dfrac{-3}{4}", "number"),
            (r"\frac34", "number"),
            ("x = 5", "number"),
            ("5", "numbers"),
            ("1, -2", "numbers"),
            (r"\{1, \frac{1}{2}\}", "numbers"),
            (r"x = 1, x = -2", "numbers"),
            (r"x_1=1, x_{2}=-2", "numbers"),
            (r"1 \text{ and } 2", "numbers"),
        ],
    )
    def test_numbers_that_are_worked_out(self, text: str, form: str) -> None:
        assert FORMS[form].fullmatch(text)

    @pytest.mark.parametrize(
        "text",
        ["2+3", "2^5", r"\sqrt{25}", "5!", r"5\%", r"\frac{1}{4} + \frac{1}{2}", "10 - 5", "5 5", "", "x", "9" * 16, "1/2/3", "\u0665",
         "5 apples", r"\frac{2+3}{1}", "1,2,3,4,5,6", "x^2-1=0"],
    )  # fmt: skip
    def test_what_is_not_worked_out_is_no_number(self, text: str) -> None:
        assert not FORMS["number"].fullmatch(text)
        assert not FORMS["numbers"].fullmatch(text) or text == "1,2"


class TestProblems:
    def test_they_follow_their_seed(self) -> None:
        assert [math_tasks(3, 50)[n] for n in range(50)] == [math_tasks.__wrapped__(3, 50)[n] for n in range(50)]
        assert math_tasks(3)[0] != math_tasks(4)[0]
        assert [math_tasks()[n].meta["kind"] for n in range(5)] == list(KINDS)
        assert math_tasks(0, 100) is math_tasks(0, 100)

    def test_answers_are_of_their_form_and_are_not_in_the_question(self) -> None:
        for index in range(1000):
            task = math_tasks()[index]
            assert FORMS[task.meta["form"]].fullmatch(task.answer), task
            assert "boxed" not in task.prompt
            assert "+ -" not in task.prompt

    def test_the_answers_solve_the_equations(self) -> None:
        """By another way than they were made: the question is read back and evaluated."""
        for index in range(200):
            for kind in ("linear", "quadratic"):
                task = math_tasks(7, 200, (kind,))[index]
                left, _, right = task.prompt.split("$")[1].partition("=")
                for root in task.answer.split(","):
                    value = exact(root.strip())
                    assert polynomial(left, value) == polynomial(right, value), task

    @pytest.mark.parametrize("wrong", [{"kinds": ("sums",)}, {"kinds": ()}, {"size": 0}])
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"kinds|size"):
            math_tasks(**wrong)

    def test_fractions_are_written_in_lowest_terms(self) -> None:
        assert [latex(Fraction(n, 4)) for n in (-6, 8, 3)] == [r"-\frac{3}{2}", "2", r"\frac{3}{4}"]

    def test_problems_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "problems.jsonl"
        path.write_text('{"prompt": "x?", "answer": "x^2", "id": "a"}\n{"prompt": "y?", "answer": 5, "id": "b"}\n')
        assert [task.answer for task in MathEnv(file=str(path)).tasks] == ["x^2", 5]
        assert read_problems(str(path)) is MathEnv(file=str(path)).tasks
        for wrong in ('"answer": null', '"answer": " "', '"answer": true', '"answer": 1, "meta": {"form": "words"}'):
            broken = tmp_path / f"{hash(wrong)}.jsonl"
            broken.write_text(f'{{"prompt": "x?", "id": "a", {wrong}}}\n')
            with pytest.raises(TaskError, match="'a' must be"):
                MathEnv(file=str(broken))

    def test_without_the_package_it_says_how_to_have_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
        symbolic.require.cache_clear()
        with pytest.raises(EnvError, match=r"pip install 'palestra\[maths\]'"):
            MathEnv()

    def test_the_second_environment_is_made_at_once(self) -> None:
        first, second = MathEnv(seed=5), MathEnv(seed=5)
        assert first.tasks is second.tasks
        assert first.rubric is second.rubric


def exact(text: str) -> Fraction:
    """The number that `latex` wrote."""
    return Fraction(text.replace(r"\frac{", "").replace("}{", "/").replace("}", ""))


def polynomial(text: str, x: Fraction) -> Fraction:
    total = Fraction(0)
    for term in text.replace("- ", "-").replace("+ ", "").split():
        number, has_x, power = term.partition("x")
        factor = Fraction({"": "1", "-": "-1"}.get(number, number) if has_x else number)
        total += factor * (x ** (2 if power == "^2" else 1) if has_x else 1)
    return total


@pytest.mark.walk
class TestGrading:
    @pytest.mark.parametrize(
        ("gold", "answer", "value"),
        [
            (r"\frac{1}{2}", "0.5", 1.0),
            (r"\frac{1}{2}", "1/2", 1.0),
            ("5", "5.0", 1.0),
            ("5", "6", 0.0),
            ("x^2-1", "(x-1)(x+1)", 1.0),
            ("x^2-1", "(x-1)(x+2)", 0.0),
            ("1, 2", r"\{2, 1\}", 1.0),
            ("1, 2", "1", 0.0),
            (12, "12", 1.0),
            (12, r"12\%", 0.0),
            ("5", "4, 5", 0.0),
            ("5", "5 or 6", 0.0),
            ("5", "?", 0.0),
            ("5", r"\frac{1}{0}", 0.0),
        ],
    )
    def test_same_meaning(self, gold: Any, answer: str, value: float) -> None:
        reward = reward_of(rf"So \boxed{{{answer}}}.", Task("q", gold, "t"))
        assert (reward.value, reward.note) == (value, f"right: extracted {answer}")
        assert dict(reward.components) == {"right": value, "boxed": 1.0}

    def test_an_expression_of_the_question_is_no_answer(self) -> None:
        task = Task("Compute $2^{5}$.", "32", "t", {"form": "number"})
        assert reward_of(r"\boxed{2^{5}}", task).value == 0.0
        assert reward_of(r"\boxed{32}", task).value == 1.0

    def test_texts_that_are_meant_to_hang_end_at_the_deadline(self) -> None:
        """0 where the text is over a cap, unknown where only our own deadline ended it."""
        task, started = Task("q", "5", "t"), time.monotonic()
        for text in (
            r"\boxed{" * 10_000,
            r"\boxed{" * 2_000,
            r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}",
            r"\boxed{" + "{" * 100 + "5" + "}" * 100 + "}",
            r"\boxed{" + "1+" * 200 + "1}",
            "x" * 19_990 + r"\boxed{5}" + " " * 100,
        ):
            assert reward_of(text, task).value == 0.0
        reward = reward_of(r"\boxed{9^{9^{9}}}", task, timeout_s=1.0)
        assert (reward.value, dict(reward.errors)) == (None, {"right": "same was killed after 1 s"})
        assert reward.components["boxed"] == 1.0
        assert time.monotonic() - started < 60
        assert worker_pids() == []

    def test_an_answer_of_the_task_that_is_no_maths_is_a_fault(self) -> None:
        reward = reward_of(r"\boxed{5}", Task("q", "", "t"))
        assert reward.value is None
        assert "cannot be read as LaTeX" in reward.errors["right"]

    def test_golden_problems_name_what_they_ask(self) -> None:
        golden = json.loads((Path(__file__).parent / "golden" / "math.json").read_text())
        tasks = math_tasks(golden["args"]["seed"], 4096, tuple(golden["args"]["kinds"]))
        assert (tasks[2].answer, tasks[3].answer) == (r"-\frac{3}{5}", r"-\frac{9}{2}, -2")
