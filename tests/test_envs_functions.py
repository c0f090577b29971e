"""Function calling: the suite, tools per task, the checker's rules, and the leaderboard's own data where they are."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.functions.bfcl import CATEGORIES, read_category, tool_name, tool_specs
from palestra.envs.functions.checker import Asked, example, judge
from palestra.envs.functions.env import FunctionCalling
from palestra.envs.functions.generated import generated_tasks
from palestra.envs.registry import register_builtin
from palestra.envs.types import Episode, Message, Task, TaskError
from tests.conformance.env_suite import EnvSuite

register_builtin("palestra/FunctionCalling-v0", "palestra.envs.functions.env:FunctionCalling")


class TestSuite(EnvSuite):
    env_id = "palestra/FunctionCalling-v0"


class TestCallsOnly(EnvSuite):
    env_id = "palestra/FunctionCalling-v0"
    args = {"categories": ["parallel", "parallel_multiple"], "seed": 4, "size": 40}  # noqa: RUF012


def function(required: tuple[str, ...] = ("a",), **kinds: Any) -> dict[str, Any]:
    properties = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in kinds.items()}
    return {
        "name": "f",
        "description": "",
        "parameters": {"type": "dict", "properties": properties, "required": required},
    }


def fault(arguments: dict[str, Any], allowed: dict[str, Any], shape: dict[str, Any]) -> str:
    return judge([Asked("f", arguments)], [{"f": allowed}], [shape])


class TestValues:
    @pytest.mark.parametrize(
        ("kind", "allowed", "value", "right"),
        [
            ("integer", [5], 5, True),
            ("integer", [5], 5.0, False),
            ("integer", [5], "5", False),
            ("integer", [1], True, False),
            ("float", [5.0], 5, True),
            ("float", [5], 5.0, True),
            ("float", [0.5, 50], 50, True),
            ("float", [1], True, False),
            ("boolean", [True], True, True),
            ("boolean", [True], 1, False),
            ("boolean", [False], True, False),
            ("string", ["New York"], "new-york", True),
            ("string", ["it's"], 'IT"S', True),
            ("string", ["New York", "NYC"], "nyc", True),
            ("string", ["New York"], "York", False),
            ("string", ["5"], 5, False),
            ("array", [["a", "B"]], ["A", "b."], True),
            ("array", [["a", "b"]], ["b", "a"], False),
            ("array", [["a", "b"], ["b", "a"]], ["b", "a"], True),
            ("array", [[1, 2]], [1], False),
            ("array", [[[1], [2]]], [[1], [2]], True),
            ("array", [[{"k": ["v"]}]], [{"k": "V"}], True),
            ("array", [[{"k": ["v"]}]], [{"k": "w"}], False),
            ("tuple", [[1, 2]], [1, 2], True),
            ("dict", [{"k": ["v", "w"], "n": [1, ""]}], {"k": "w"}, True),
            ("dict", [{"k": ["v"], "n": [1, ""]}], {"k": "v", "n": 1}, True),
            ("dict", [{"k": ["v"], "n": [1, ""]}], {"k": "v", "n": 2}, False),
            ("dict", [{"k": ["v"]}], {"k": "v", "more": 1}, False),
            ("dict", [{"k": ["v"]}], {}, False),
            ("any", ["x"], "x", True),
            ("array", ["data['sales']"], "data['sales']", True),
            ("array", ["data['sales']"], "DATA['sales']", False),
            ("integer", [""], "", False),
        ],
    )
    def test_table(self, kind: str, allowed: list[Any], value: Any, right: bool) -> None:
        assert (fault({"a": value}, {"a": allowed}, function(a=kind)) == "") is right

    def test_arguments_left_out_and_too_many(self) -> None:
        shape = function(a="integer", b="string", c="string")
        allowed = {"a": [1], "b": ["x", ""], "c": ["y"]}
        assert fault({"a": 1, "c": "y"}, allowed, shape) == ""
        assert fault({"a": 1}, allowed, shape) == "f: c was left out"
        assert fault({"c": "y"}, allowed, shape) == "f: a is required"
        assert fault({"a": 1, "c": "y", "d": 1}, allowed, shape) == "f: d was not expected"
        assert fault({"a": 1, "c": "y"}, {"a": [1]}, shape) == "f: c was not expected"


class TestCalls:
    one, two = {"f": {"a": [1, 2]}}, {"f": {"a": [1]}}
    shapes = (function(a="integer"),)

    def test_each_expectation_needs_a_call_of_its_own(self) -> None:
        first, second, third = (Asked("f", {"a": value}) for value in (1, 2, 3))
        assert judge([first, second], [self.one, self.two], self.shapes) == ""
        assert judge([second, first], [self.one, self.two], self.shapes) == ""
        assert judge([first, first], [self.one, self.two], self.shapes) == ""
        assert judge([second, second], [self.one, self.two], self.shapes) == "f: a is '2'"
        assert judge([first, third], [self.one, self.two], self.shapes)
        assert judge([first], [self.one, self.two], self.shapes) == "1 calls, expected 2"
        assert judge([first] * 3, [self.one, self.two], self.shapes) == "3 calls, expected 2"

    def test_two_expectations_that_one_call_meets_need_two_calls(self) -> None:
        assert judge([Asked("f", {"a": 1}), Asked("f", {"a": 2})], [self.two, self.two], self.shapes)

    def test_the_wrong_function(self) -> None:
        assert judge([Asked("g", {"a": 1})], [self.one], self.shapes) == "called g, expected f"


def played(task: Task, *script: Message | str, **arguments: Any) -> Episode:
    return play(FunctionCalling(**arguments), ScriptedPolicy(script), Limits(), task=task, seed=0)


def calling(*calls: tuple[Any, Any]) -> Message:
    made = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


DOTTED = {**function(("x",), x="float", mode={"type": "string", "enum": ["fast"]}), "name": "math.root"}
TASK = Task(
    ({"role": "user", "content": "root of 4"},),
    [{"math.root": {"x": [4], "mode": ["", "fast"]}}],
    "t",
    {"functions": [DOTTED]},
)
NONE = Task("fly me to the moon", None, "n", {"functions": [DOTTED]})


class TestEpisodes:
    def test_a_task_brings_its_own_tools_into_the_first_request(self) -> None:
        asked: list[Any] = []

        class Policy(ScriptedPolicy):
            def act(self, messages: Any, tools: Any, timeout_s: float) -> Any:
                asked.append(tools)
                return super().act(messages, tools, timeout_s)

        env = FunctionCalling()
        assert env.tool_specs() == ()
        for task in (TASK, env.tasks[0]):
            episode = play(env, Policy([""]), Limits(), task=task, seed=0)
            assert episode.tools == asked.pop() == env.tool_specs()
            assert [spec["function"]["name"] for spec in episode.tools] == [
                tool_name(shape["name"]) for shape in task.meta["functions"]
            ]

    def test_schemas_have_types_of_json_and_names_that_apis_take(self) -> None:
        shape = function(
            type={"type": "any"},
            items={"type": "array", "items": {"type": "float"}},
            properties={"type": "dict", "properties": {"type": {"type": "tuple", "items": {"type": "integer"}}}},
            a={"type": "integer", "optional": True, "default": 3, "enum": [3, 4]},
        )
        (spec,) = tool_specs([shape])
        parameters = spec["function"]["parameters"]
        assert parameters["type"] == "object"
        assert parameters["properties"] == {
            "type": {},
            "items": {"type": "array", "items": {"type": "number"}},
            "properties": {
                "type": "object",
                "properties": {"type": {"type": "array", "items": {"type": "integer"}}},
            },
            "a": {"type": "integer", "default": 3, "enum": [3, 4]},
        }
        assert tool_name("a.b c/é") == "a_b_c__"

    @pytest.mark.parametrize(
        ("script", "value", "says"),
        [
            (calling(("math_root", '{"x": 4}')), 1.0, ""),
            (calling(("math.root", {"x": 4.0, "mode": "Fast"})), 1.0, ""),
            (calling(("math_root", '{"x": 5}')), 0.0, "x is '5'"),
            (calling(("math_root", '{"x": 4')), 0.0, "not valid JSON"),
            (calling(("math_root", '{"x": 4}'), ("math_root", '{"x": 4}')), 0.0, "2 calls, expected 1"),
            (calling(("root", '{"x": 4}')), 0.0, "called root, expected math.root"),
            (calling((None, None)), 0.0, "must be a JSON object"),
            ("math.root(x=4)", 0.0, "0 calls, expected 1"),
            ("No function fits.", 0.0, "0 calls, expected 1"),
        ],
    )
    def test_calls(self, script: Any, value: float, says: str) -> None:
        episode = played(TASK, script)
        assert episode.reward.value == value
        assert says in episode.reward.note
        assert (episode.turns, episode.terminated) == (1, True)

    @pytest.mark.parametrize(
        ("text", "strict", "loose"),
        [
            ("No function fits.", 1.0, 1.0),
            (" no function fits\n", 1.0, 1.0),
            ("I cannot do that.", 0.0, 1.0),
            ("No function fits. Or does math.root?", 0.0, 1.0),
            ("", 0.0, 1.0),
            (calling(("math_root", '{"x": 4}')), 0.0, 0.0),
        ],
    )
    def test_where_no_function_fits(self, text: Any, strict: float, loose: float) -> None:
        assert played(NONE, text).reward.value == strict
        assert played(NONE, text, strict=False).reward.value == loose

    @pytest.mark.parametrize("wrong", [{"data": "mine"}, {"categories": ["java"]}, {"categories": []}])
    def test_wrong_arguments_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FunctionCalling(**wrong)


class TestGenerated:
    def test_the_categories_take_turns_and_keep_what_they_promise(self) -> None:
        tasks = generated_tasks(seed=2, size=200)
        for index in range(200):
            task = tasks[index]
            category, offered = task.meta["category"], {shape["name"] for shape in task.meta["functions"]}
            assert category == CATEGORIES[index % len(CATEGORIES)]
            called = [name for answer in task.answer or () for name in answer]
            assert set(called) <= offered
            assert (len(called) > 1) is category.startswith("parallel")
            assert (len(offered) > 1) is (category not in ("simple_python", "parallel"))
            assert (task.answer is None) is (category == "irrelevance")
        assert generated_tasks(seed=2, size=9)[3] == tasks[3]
        assert generated_tasks(seed=3)[3] != tasks[3]


class TestFiles:
    def write(self, folder: Path, version: int, category: str, answer: Any) -> None:
        (folder / "possible_answer").mkdir(exist_ok=True)
        row = {"id": f"{category}_0", "question": [[{"role": "user", "content": f"v{version}"}]], "function": [DOTTED]}
        name = f"BFCL_v{version}_{category}.json"
        (folder / name).write_text(json.dumps(row) + "\n")
        (folder / "possible_answer" / name).write_text(json.dumps({"id": row["id"], "ground_truth": answer}) + "\n")

    def test_the_newest_file_of_the_very_category_is_read(self, tmp_path: Path) -> None:
        for version, category in ((3, "multiple"), (10, "multiple"), (11, "live_multiple"), (11, "parallel_multiple")):
            self.write(tmp_path, version, category, [{"math.root": {"x": [version]}}])
        (task,) = read_category("multiple", tmp_path)
        assert (task.id, task.answer) == ("multiple_0", [{"math.root": {"x": [10]}}])
        assert task.prompt == ({"role": "user", "content": "v10"},)

    def test_faults_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match="no file of category 'multiple'"):
            read_category("multiple", tmp_path)
        with pytest.raises(TaskError, match="no category 'web_search'"):
            read_category("web_search", tmp_path)
        self.write(tmp_path, 4, "parallel", [])
        (tmp_path / "possible_answer" / "BFCL_v4_parallel.json").write_text('{"id": "other", "ground_truth": []}\n')
        with pytest.raises(TaskError, match="a record is broken: KeyError"):
            read_category("parallel", tmp_path)
        (tmp_path / "BFCL_v4_parallel.json").write_text("{\n")
        with pytest.raises(TaskError, match="cannot be read"):
            read_category("parallel", tmp_path / ".")


SIZES = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240}


@pytest.mark.full
class TestLeaderboard:
    @pytest.mark.parametrize("category", CATEGORIES)
    def test_oracle_one_and_the_next_tasks_oracle_and_silence_nothing(self, category: str) -> None:
        env = FunctionCalling(data="bfcl", categories=[category])
        tasks = env.tasks
        assert len(tasks) == SIZES[category]
        for index in range(len(tasks)):
            assert self.value(env, tasks[index], env.oracle(tasks[index])[0]) == 1.0
            assert self.value(env, tasks[index], {"role": "assistant", "content": ""}) == 0.0
            if category != "irrelevance":
                assert self.value(env, tasks[index], env.oracle(tasks[index - 1])[0]) == 0.0

    def value(self, env: FunctionCalling, task: Task, message: Message) -> float | None:
        env.reset(options={"task": task})
        reward: float | None = env.step(message)[-1]["step"].reward.value
        return reward

    def test_verdicts_are_those_of_the_leaderboards_own_checker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On right calls with seeded changes. Its modules that want clients and parsers of other languages are empty."""
        theirs, python = leaderboard_checker(monkeypatch)
        draw, verdicts = random.Random(0), Counter[bool]()
        for category in CATEGORIES[:-1]:
            for task in read_category(category):
                shapes = {shape["name"]: shape for shape in task.meta["functions"]}
                right = [example(answer, shapes[next(iter(answer))]) for answer in task.answer]
                for _ in range(4):
                    calls = [changed(call, draw) if draw.random() < 0.6 else call for call in right]
                    functions, possible = copy.deepcopy((list(task.meta["functions"]), task.answer))
                    output = [{call.name: copy.deepcopy(dict(call.arguments))} for call in calls]
                    verdict = theirs(functions, output, possible, python, category, "any")["valid"]
                    assert (judge(calls, task.answer, task.meta["functions"]) == "") is verdict, (task.id, calls)
                    verdicts[verdict] += 1
        assert min(verdicts.values()) > 1000


def leaderboard_checker(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    class Models(dict[str, Any]):
        def __missing__(self, key: str) -> Any:
            return types.SimpleNamespace(underscore_to_dot=False)

    convert = "bfcl_eval.eval_checker.ast_eval.type_convertor."
    for name, attribute, value in (
        ("bfcl_eval.constants.model_config", "MODEL_CONFIG_MAPPING", Models()),
        (f"{convert}java_type_converter", "java_type_converter", None),
        (f"{convert}js_type_converter", "js_type_converter", None),
    ):
        module = types.ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return checker.ast_checker, importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON


def changed(call: Asked, draw: random.Random) -> Asked:
    """The call with one thing about it made different, which may or may not make it wrong."""
    arguments = copy.deepcopy(dict(call.arguments))
    kind = draw.randrange(8)
    if kind == 0 or not arguments:
        return Asked(call.name + "x", arguments)
    key = draw.choice(sorted(arguments))
    value = arguments.pop(key)
    if kind == 1:
        return Asked(call.name, arguments)
    number = type(value) in (int, float)
    changes = {
        2: value.upper() + " ." if isinstance(value, str) else value,
        3: float(value) if number else value,
        4: str(value),
        5: [value],
        6: value + 1
        if number
        else not value
        if isinstance(value, bool)
        else value[:-1]
        if value and isinstance(value, str | list)
        else value,
        7: int(value) if number and value == int(value) else value,
    }
    return Asked(call.name, {**arguments, key: changes[kind]})
