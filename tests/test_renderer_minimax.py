"""MiniMax-M2: one block for all of a reply's calls, in XML's manner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.renderer.blocks import read_xml
from palestra.server.renderer.families.minimax import CALL, MiniMaxRenderer
from palestra.server.renderer.types import RenderOptions
from tests.renderer_cases import ASKED, CONVERSATION, TOOLS, call, for_family, plain, play, sampled, tiny

EXPECTED = (
    "]~!b[]~b]system\nBe brief.\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
    f"<tool>{json.dumps(TOOLS[0]['function'])}</tool>\n<tool>{json.dumps(TOOLS[1]['function'])}</tool>\n"
    "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n<minimax:tool_call>\n"
    '<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>[e~[\n'
    "]~b]user\nWeather in Zürich, and 1+2?[e~[\n"
    "]~b]ai\n<think>\nTwo calls.\n</think>\n\nLet me look.\n<minimax:tool_call>\n"
    '<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="calculator">\n<parameter name="expression">1+2</parameter>\n</invoke>\n</minimax:tool_call>[e~[\n'
    "]~b]tool\n<response>rain <|im_end|></response>\n<response>3</response>[e~[\n"
    "]~b]ai\n<think>\nBoth are known.\n</think>\n\nRain, and 3.[e~[\n"
    "]~b]user\nThanks. And you?[e~[\n]~b]ai\n<think>\n"
)


@pytest.fixture(scope="module")
def minimax(tmp_path_factory: pytest.TempPathFactory) -> MiniMaxRenderer:
    renderer = tiny("minimax", tmp_path_factory.mktemp("minimax"))
    assert isinstance(renderer, MiniMaxRenderer)
    return renderer


def text(renderer: MiniMaxRenderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def read(renderer: MiniMaxRenderer, block: str) -> Any:
    said = f"</think>\n\n\n<minimax:tool_call>{block}</minimax:tool_call>"
    return renderer.parse(renderer.codec.encode(renderer.codec.wording(said)), [renderer.marks[0]])


def test_a_conversation_with_two_tools(minimax: MiniMaxRenderer) -> None:
    assert text(minimax, minimax.render(CONVERSATION, TOOLS).ids) == EXPECTED
    assert text(minimax, play(minimax, CONVERSATION).ids) == EXPECTED


def test_defaults(minimax: MiniMaxRenderer) -> None:
    for messages in (ASKED[1:], [{"role": "system", "content": ""}, ASKED[1]]):
        assert text(minimax, minimax.render(messages).ids) == (
            "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\nWeather in Zürich, and 1+2?[e~[\n]~b]ai\n<think>\n"
        )
    past = text(minimax, minimax.render(for_family("", CONVERSATION)).ids)
    assert past.count("<think>") == 1


def test_a_forced_call_does_not_begin_inside_reasoning(minimax: MiniMaxRenderer) -> None:
    prompt = minimax.render(ASKED, TOOLS, RenderOptions(call="weather"))
    assert text(minimax, prompt.ids).endswith(
        ']~b]ai\n<think>\n\n</think>\n\n\n<minimax:tool_call>\n<invoke name="weather">\n'
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"a": [1, {"b": "ü"}], "c": None, "d": False, "e": 0},
        {"a": "two\nlines\n", "b": "</parameter> x", "c": "", "d": " </invoke>"},
    ],
)
def test_arguments_come_back_as_they_were(minimax: MiniMaxRenderer, arguments: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", **arguments), call("g", x=1)]}
    reply = minimax.parse(sampled(minimax, message), [minimax.marks[0]])
    assert plain(reply.message) == plain(message)
    assert reply.ill_formed is None


def test_a_broken_call_among_good_ones_is_the_only_raw_one(minimax: MiniMaxRenderer) -> None:
    good = '<invoke name="f"><parameter name="a">1</parameter></invoke>'
    bad = '<invoke name="g"><parameter name="a">1</invoke>'
    reply = read(minimax, good + bad + good)
    assert [c["function"]["name"] for c in reply.message["tool_calls"]] == ["f", "g", "f"]
    assert [c["function"]["arguments"] for c in reply.message["tool_calls"]] == [
        '{"a": 1}',
        '<parameter name="a">1',
        '{"a": 1}',
    ]
    assert reply.ill_formed is not None


def test_a_block_that_holds_no_call_stays_text(minimax: MiniMaxRenderer) -> None:
    reply = read(minimax, "hm")
    assert reply.message["content"] == "<minimax:tool_call>hm</minimax:tool_call>"
    assert reply.ill_formed == "a call without a name"
    assert read(minimax, '<invoke name="f"></invoke>hm').ill_formed is not None


@pytest.mark.parametrize(
    "part", ['<invoke name="f">', '<invoke name="f"><parameter name="a"></invoke>', "</parameter> " * 3]
)
def test_ten_thousand_parts_of_one_block_are_one_scan(part: str) -> None:
    calls, wrong = read_xml(CALL, '<invoke name="f"><parameter name="a">' + part * 10_000)
    assert calls
    assert wrong is not None
