"""Tools: schemas, arguments, deadlines, results."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import select
import threading
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional

import numpy as np
import pytest
from pydantic import BaseModel, Field

from palestra.envs import background
from palestra.envs.schema import parse_arguments, read_signature
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import Call, collect_tools, result_text, run_call, tool
from palestra.envs.types import EnvError, Task, ToolError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Tree(BaseModel):
    """A tree of names."""

    name: str = Field(description="what it is called")
    children: list[Tree] = []


class Point(BaseModel):
    x: int
    title: str = "p"


def add(a: int, b: int = 5) -> int:
    """Add two numbers.

    Args:
        a: the first, 日本
        b: the second
    """
    return a + b


def optional(note: str = None, colour: Colour = Colour.RED) -> str:  # type: ignore[assignment]  # noqa: RUF013
    """Optional things."""
    return f"{note} {colour}"


def reserved(model_config: int, model_dump: int, schema: str, json: str, copy: bool, title: str, _x: int = 0) -> Any:
    return model_config, model_dump, schema, json, copy, title, _x


def nested(points: list[Point], mode: Literal["a", "b"] = "a") -> int:
    return sum(point.x for point in points)


def plain_defaults(
    a: int, b: int = 5, c: float = 0.5, d: bool = False, e: str = "x", f: tuple[int, str] = (1, "a")
) -> None:
    """Defaults of every kind."""


def nullable(a: int | None, b: Optional[str] = None, c: str = None, d: list[int] | None = None) -> None:  # type: ignore[assignment]  # noqa: RUF013, UP045
    """Four ways to say none."""


def choices(
    mode: Literal["a", 2, None],
    colour: Colour,
    level: Level = Level.LOW,
    kinds: list[Colour] = [Colour.RED],  # noqa: B006
) -> None:
    """Literals and enums."""


def containers(
    names: list[str],
    pairs: dict[str, list[int]],
    unique: set[int],
    either: int | str,
    anything: Any,
    rows: list[dict[str, Any]],
) -> None:
    """Lists in lists."""


def models(tree: Tree, points: list[Point], either: Point | Colour | None = None) -> None:
    """Nested and recursive models."""


def annotated(
    size: Annotated[int, Field(ge=1, le=9, description="from the hint")],
    code: Annotated[str, Field(pattern="^[A-Z]+$", max_length=4)] = "AB",
    day: date = date(2020, 2, 29),
    tone: Annotated[str, Field(description="from the hint alone")] = "",
) -> None:
    """Bounds.

    Args:
        size: the docstring wins
        code: letters
    """


def keyword_only(a: int, *, title: str, größe: float = 1.0) -> None:
    """日本 – a short line.

    And a longer one, with `code` and "quotes".

    Parameters
    ----------
    a : int
        the first
        of two lines
    title
        Ünïcödé \u2028 and emoji 😀

    Returns
    -------
    None
    """


def sphinx(a: int, b: str = "") -> None:
    """Does it.

    :param a: the number
    :type a: int
    :param b: the text
    :returns: nothing
    :raises ValueError: never
    """


def bare(a: int) -> None:
    pass


AWKWARD = (
    add,
    optional,
    reserved,
    nested,
    plain_defaults,
    nullable,
    choices,
    containers,
    models,
    annotated,
    keyword_only,
    sphinx,
    bare,
)


class TestSchemas:
    def test_defaults_are_not_required_and_docs_are_descriptions(self) -> None:
        signature = read_signature(add)
        assert signature.description == "Add two numbers."
        assert signature.parameters == {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first, 日本"},
                "b": {"type": "integer", "description": "the second", "default": 5},
            },
            "required": ["a"],
        }

    def test_none_as_default_is_nullable(self) -> None:
        properties = read_signature(optional).parameters["properties"]
        assert properties["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("function", AWKWARD, ids=lambda function: function.__name__)
    def test_awkward_functions_have_the_schemas_that_were_written_down(self, function: Any) -> None:
        """What models are told. A change of it, ours or pydantic's, is a change of every prompt: it has to be meant."""
        golden = json.loads((Path(__file__).parent / "golden_schemas.json").read_text())
        signature = read_signature(function)
        assert {"description": signature.description, "parameters": signature.parameters} == golden[function.__name__]

    @pytest.mark.filterwarnings("error")
    def test_names_that_pydantic_keeps_for_itself_arrive(self) -> None:
        signature = read_signature(reserved)
        given = {"model_config": 1, "model_dump": 2, "schema": "s", "json": "j", "copy": True, "title": "t", "_x": 3}
        assert set(signature.parameters["properties"]) == set(given)
        assert parse_arguments(signature, json.dumps(given)) == given

    def test_nested_models_are_described_and_built(self) -> None:
        signature = read_signature(nested)
        assert signature.parameters["$defs"]["Point"]["properties"]["title"] == {"type": "string", "default": "p"}
        assert nested(**parse_arguments(signature, '{"points": [{"x": 2}, {"x": 3, "title": "q"}]}')) == 5

    @pytest.mark.parametrize(
        "docstring",
        [
            "Do it.\n\nParameters\n----------\nx : int\n    the number",
            "Do it.\n\n:param x: the number",
            "Do it.\n\nArgs:\n    x: the number",
        ],
    )
    def test_three_styles_of_docstrings(self, docstring: str) -> None:
        def function(x: int) -> int:
            return x

        function.__doc__ = docstring
        signature = read_signature(function)
        assert signature.description == "Do it."
        assert signature.parameters["properties"]["x"]["description"] == "the number"

    def test_parameters_without_a_usable_name_or_hint_are_refused_with_their_name(self) -> None:
        def star(*numbers: int) -> int:
            return sum(numbers)

        def bare(number):  # type: ignore[no-untyped-def]
            return number

        with pytest.raises(TypeError, match=r"\*numbers"):
            read_signature(star)
        with pytest.raises(TypeError, match="number needs a type hint"):
            read_signature(bare)

    def test_a_class_with_a_bad_tool_is_refused_when_it_is_defined(self) -> None:
        with pytest.raises(TypeError, match="needs a type hint"):

            class Bad(ToolEnv):
                @tool
                def look(self, where):  # type: ignore[no-untyped-def]
                    return where

    def test_two_tools_of_one_name_are_refused(self) -> None:
        class Twice:
            @tool(name="same")
            def one(self) -> int:
                return 1

            @tool(name="same")
            def two(self) -> int:
                return 2

        with pytest.raises(TypeError, match="same"):
            collect_tools(Twice)

    def test_schemas_are_built_once_per_class(self) -> None:
        assert Toolbox().tools is Toolbox().tools


class TestArguments:
    signature = read_signature(add)

    @pytest.mark.parametrize(
        ("raw", "expected"),
        [
            ('{"a": 1}', {"a": 1}),
            ('{"a": "7", "b": 2.0}', {"a": 7, "b": 2}),
            ({"a": 3}, {"a": 3}),
        ],
    )
    def test_good(self, raw: Any, expected: dict[str, int]) -> None:
        assert parse_arguments(self.signature, raw) == expected

    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            ("", "a: Field required"),
            ("null", "must be a JSON object, got NoneType"),
            (None, "must be a JSON object, got NoneType"),
            ("[1]", "must be a JSON object, got list"),
            ('"{\\"a\\": 1}"', "must be a JSON object, got str"),
            ('{"a": 1', "not valid JSON"),
            ('{"a": 1} {"a": 2}', "not valid JSON"),
            ('{"a": NaN}', "NaN"),
            ('{"a": 1e400}', "a: "),
            ('{"a": 1.5}', "a: "),
            ("[" * 100_000, "not valid JSON"),
            ('{"a": ' + "9" * 5_000 + "}", "not valid JSON"),
            ('{"a": 1, "c": 2}', "c: Extra inputs"),
            ('{"a": {"b": ' * 200 + "1" + "}}" * 200, "a: "),
        ],
    )
    def test_bad_is_one_line_that_says_what(self, raw: Any, says: str) -> None:
        with pytest.raises(ValueError, match=r".+") as caught:
            parse_arguments(self.signature, raw)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


class Toolbox(ToolEnv):
    tasks = (Task("go", None, "t"),)
    release = threading.Event()

    @tool
    def double(self, x: int) -> int:
        """Twice x."""
        return 2 * x

    @tool
    def japanese(self) -> dict[str, str]:
        return {"day": "日曜日"}

    @tool
    def refuse(self) -> str:
        raise ToolError("not today")

    @tool
    def break_down(self) -> str:
        raise KeyError("a bug")

    @tool(timeout_s=0.05)
    def hang(self) -> str:
        self.release.wait(30)
        return "late"

    @tool(timeout_s=0.05)
    async def hang_async(self) -> str:
        await asyncio.sleep(30)
        return "late"

    @tool
    async def quick_async(self, text: str) -> str:
        await asyncio.sleep(0)
        return text

    @tool
    @staticmethod
    def fixed(x: int) -> int:
        return x

    @tool(timeout_s=5)
    def own_timeout(self) -> str:
        raise TimeoutError("the database was slow")

    @tool
    async def own_timeout_async(self) -> str:
        raise TimeoutError("the database was slow")


def ask(name: str, arguments: Any = "{}", call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def say(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.fixture
def env() -> Any:
    Toolbox.release.clear()
    env = Toolbox()
    env.reset(seed=0)
    yield env
    Toolbox.release.set()


def answer(env: ToolEnv, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    return list(env.step(say(*calls))[0])


class TestCalls:
    def test_several_calls_in_one_message_are_answered_in_order_each_with_its_id(self, env: Toolbox) -> None:
        got = answer(env, ask("double", '{"x": 1}', "a"), ask("refuse", "{}", "b"), ask("double", '{"x": 3}', "c"))
        assert [(item["tool_call_id"], item["content"]) for item in got] == [
            ("a", "2"),
            ("b", "Error: not today"),
            ("c", "6"),
        ]
        assert (env.tool_calls, env.tool_errors) == (3, 1)
        assert [call.result for call in env.calls] == [2, None, 6]

    def test_cut_arguments_are_an_error_text_with_the_same_id(self, env: Toolbox) -> None:
        (got,) = answer(env, ask("double", '{"x": 1', "call_77"))
        assert got["tool_call_id"] == "call_77"
        assert got["content"].startswith("Error: arguments are not valid JSON")

    def test_doubly_encoded_arguments_are_an_error_text(self, env: Toolbox) -> None:
        (got,) = answer(env, ask("double", json.dumps('{"x": 1}')))
        assert got["content"] == "Error: arguments must be a JSON object, got str"

    def test_a_missing_id_is_made_up_and_stands_in_the_transcript_too(self, env: Toolbox) -> None:
        got = answer(env, ask("double", '{"x": 1}', None), ask("double", '{"x": 2}', ""))
        ids = [item["tool_call_id"] for item in got]
        assert len(set(ids)) == 2
        assert all(ids)
        assert [call["id"] for call in env.transcript[0]["tool_calls"]] == ids

    def test_unknown_tools_are_told_what_there_is(self, env: Toolbox) -> None:
        (got,) = answer(env, ask("nothing"))
        assert "no tool named 'nothing'" in got["content"]
        assert "double" in got["content"]

    def test_letters_of_the_world_are_kept(self, env: Toolbox) -> None:
        (got,) = answer(env, ask("japanese"))
        assert got["content"] == '{"day": "日曜日"}'

    def test_a_bug_in_a_tool_is_a_fault_of_the_environment(self, env: Toolbox) -> None:
        with pytest.raises(EnvError, match="break_down: KeyError"):
            env.step(say(ask("break_down")))

    @pytest.mark.parametrize("name", ["own_timeout", "own_timeout_async"])
    def test_a_timeout_of_the_tools_own_is_a_fault_too(self, env: Toolbox, name: str) -> None:
        with pytest.raises(EnvError, match="the database was slow"):
            env.step(say(ask(name)))

    def test_ten_hung_tools_and_a_quick_one_after_them(self, env: Toolbox) -> None:
        for name in ("hang", "hang_async") * 5:
            (got,) = answer(env, ask(name))
            assert "ran past 0.05 s" in got["content"]
        after = answer(env, ask("double", '{"x": 4}'), ask("quick_async", '{"text": "hi"}'), ask("fixed", '{"x": 9}'))
        assert [item["content"] for item in after] == ["8", "hi", "9"]

    def test_two_environments_with_waiting_tools_wait_at_the_same_time(self) -> None:
        both = threading.Barrier(2)

        class Meeting(ToolEnv):
            tasks = (Task("go", None, "t"),)

            @tool(timeout_s=20)
            def meet(self) -> str:
                both.wait(15)
                return "met"

        got: list[str] = []

        def run() -> None:
            env = Meeting()
            env.reset(seed=0)
            got.append(env.step(say(ask("meet")))[0][0]["content"])

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == ["met", "met"]


class Side(ToolEnv):
    """Its calls of one message run at the same time."""

    parallel: ClassVar[bool] = True
    tasks = (Task("go", None, "t"),)
    both = threading.Barrier(2)
    first, second = asyncio.Event(), asyncio.Event()

    @tool
    def meet(self) -> str:
        """Returns only when another call is under way."""
        self.both.wait(20)
        return "met"

    @tool(timeout_s=20)
    def meet_in_time(self) -> str:
        self.both.wait(20)
        return "met in time"

    @tool
    async def give(self) -> str:
        self.first.set()
        await self.second.wait()
        return "given"

    @tool
    async def take(self) -> str:
        await self.first.wait()
        self.second.set()
        return "taken"

    @tool(timeout_s=0.05)
    def hang(self) -> str:
        Toolbox.release.wait(30)
        return "late"

    @tool
    def echo(self, text: str) -> str:
        return text

    @tool
    def refuse(self) -> str:
        raise ToolError("not today")

    @tool
    def break_down(self) -> str:
        raise KeyError("a bug")


@pytest.fixture
def side() -> Any:
    Toolbox.release.clear()
    env = Side()
    env.reset(seed=0)
    yield env
    Toolbox.release.set()


class TestParallelCalls:
    def test_two_calls_wait_for_each_other_and_are_answered_in_their_order(self, side: Side) -> None:
        got = answer(
            side,
            ask("meet", "{}", "a"),
            ask("echo", '{"text": "x"}', "b"),
            ask("refuse", "{}", "c"),
            ask("meet_in_time", "{}", "d"),
        )
        assert [(item["tool_call_id"], item["content"]) for item in got] == [
            ("a", "met"),
            ("b", "x"),
            ("c", "Error: not today"),
            ("d", "met in time"),
        ]
        assert [call.name for call in side.calls] == ["meet", "echo", "refuse", "meet_in_time"]
        assert (side.tool_calls, side.tool_errors) == (4, 1)

    def test_two_async_tools_overlap(self, side: Side) -> None:
        got = answer(side, ask("give", "{}", "a"), ask("take", "{}", "b"))
        assert [item["content"] for item in got] == ["given", "taken"]

    def test_deadlines_are_each_calls_own(self, side: Side) -> None:
        got = answer(side, *[ask("hang", "{}", str(at)) for at in range(10)], ask("echo", '{"text": "quick"}', "z"))
        assert all("ran past 0.05 s" in item["content"] for item in got[:10])
        assert got[10]["content"] == "quick"

    def test_a_fault_of_one_is_a_fault_of_the_message(self, side: Side) -> None:
        with pytest.raises(EnvError, match="break_down: KeyError"):
            side.step(say(ask("echo", '{"text": "x"}'), ask("break_down")))

    def test_one_call_alone_runs_in_the_episodes_own_thread(self) -> None:
        class Where(ToolEnv):
            parallel: ClassVar[bool] = True
            tasks = (Task("go", None, "t"),)

            @tool
            def thread(self) -> str:
                return threading.current_thread().name

        env = Where()
        env.reset(seed=0)
        assert answer(env, ask("thread"))[0]["content"] == threading.current_thread().name
        beside = {item["content"] for item in answer(env, ask("thread"), ask("thread"))}
        assert threading.current_thread().name not in beside


@dataclass
class Pair:
    a: int
    b: str


class TestResults:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("as it is", "as it is"),
            (None, "null"),
            (np.float64(1.5), "1.5"),
            (np.arange(3), "[0, 1, 2]"),
            ({"b", "a"}, '["a", "b"]'),
            (Pair(1, "ü"), '{"a": 1, "b": "ü"}'),
            (Point(x=1), '{"x": 1, "title": "p"}'),
            ("lone \ud800", "lone ?"),
        ],
    )
    def test_text(self, value: Any, text: str) -> None:
        assert result_text(value) == text

    def test_the_middle_of_a_long_result_is_left_out_with_its_length(self) -> None:
        text = result_text("a" * 15_000 + "b" * 15_000)
        assert text.startswith("a" * 10_000)
        assert text.endswith("b" * 10_000)
        assert "[10000 characters left out]" in text

    def test_what_cannot_be_written_is_a_fault(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(EnvError, match="JSON"):
            result_text(loop)

    def test_a_call_that_is_no_call_is_answered(self) -> None:
        call = run_call({"function": "double"}, Toolbox.tools, object())
        assert isinstance(call, Call)
        assert call.error is not None


class TestBackground:
    def test_the_loop_is_one_thread_and_results_come_back(self) -> None:
        async def where() -> str:
            return threading.current_thread().name

        assert {background.call(where(), 5) for _ in range(3)} == {"palestra-loop"}

    def test_a_coroutine_is_cancelled_at_its_deadline(self) -> None:
        cancelled = threading.Event()

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        with pytest.raises(TimeoutError):
            background.call(slow(), 0.05)
        assert cancelled.wait(5)

    def test_waiting_for_the_loop_on_the_loop_is_refused(self) -> None:
        async def inner() -> None:
            return None

        async def outer() -> None:
            background.call(inner(), 1)

        with pytest.raises(RuntimeError, match="await the coroutine"):
            background.call(outer(), 5)

    def test_a_forked_child_has_a_loop_of_its_own(self) -> None:
        async def seven() -> int:
            return 7

        assert background.call(seven(), 5) == 7
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if background.call(seven(), 5) == 7 else 2
            finally:
                os._exit(code)
        ended = select.select([os.pidfd_open(pid)], [], [], 20)[0]
        if not ended:
            os.kill(pid, 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
