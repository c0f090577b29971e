"""GLM-4.5 and 4.6: headers that are also what the model stops on, and arguments between marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.renderer.families.glm import GlmRenderer
from palestra.server.renderer.types import RenderOptions, Snapshot
from tests.renderer_cases import (
    ANSWERED,
    ASKED,
    CALLED,
    CONVERSATION,
    RESULTS,
    THANKED,
    TOOLS,
    call,
    plain,
    sampled,
    tiny,
)

SILENT = RenderOptions(thinking=False)
OPENING = (
    "[gMASK]<sop><|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    f"{json.dumps(TOOLS[0])}\n{json.dumps(TOOLS[1])}\n"
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call><|system|>\nBe brief."
)
TURNS = (
    "<|user|>\nWeather in Zürich, and 1+2?<|assistant|>\n<think>Two calls.</think>\nLet me look.\n"
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n"
    "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1+2</arg_value>\n</tool_call>"
    "<|observation|>\n<tool_response>\nrain <|im_end|>\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    "<|assistant|>\n<think>Both are known.</think>\nRain, and 3.<|user|>\nThanks. And you?<|assistant|>"
)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> GlmRenderer:
    renderer = tiny("glm", tmp_path_factory.mktemp("glm"))
    assert isinstance(renderer, GlmRenderer)
    return renderer


def text(renderer: GlmRenderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def ids_of(renderer: GlmRenderer, said: str) -> list[int]:
    return renderer.codec.encode(renderer.codec.wording(said))


def test_a_conversation_with_two_tools(glm: GlmRenderer) -> None:
    ids = glm.render(CONVERSATION, TOOLS).ids
    assert text(glm, ids) == OPENING + TURNS
    assert text(glm, glm.render(ASKED[1:]).ids).startswith("[gMASK]<sop><|user|>\nWeather")


@pytest.mark.parametrize(
    ("message", "new", "header"), [(CALLED, RESULTS, "<|observation|>"), (ANSWERED, [THANKED], "<|user|>")]
)
def test_what_the_model_stopped_on_is_the_next_header(
    glm: GlmRenderer, message: Any, new: list[dict[str, Any]], header: str
) -> None:
    completion = sampled(glm, message)
    assert glm.codec.token_text(completion[-1]) == header
    after = text(glm, glm.extend(Snapshot(completion, message), new).ids)
    cut = text(glm, glm.extend(Snapshot(completion[:-1], message), new).ids)
    assert cut == header + after
    assert not after.startswith(header)


def test_a_stop_on_the_other_header_stays_as_an_empty_turn(glm: GlmRenderer) -> None:
    completion = [*sampled(glm, CALLED)[:-1], glm.user]
    after = text(glm, glm.extend(Snapshot(completion, CALLED), RESULTS).ids)
    assert after.startswith("<|observation|>\n<tool_response>\nrain")


def test_without_thinking_each_user_s_turn_says_so(glm: GlmRenderer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b/nothink"}]
    ids = glm.render(messages, (), SILENT).ids
    assert text(glm, ids) == "[gMASK]<sop><|user|>\na/nothink<|user|>\nb/nothink<|assistant|>\n<think></think>"
    assert ids.count(glm.codec.special_id("/nothink")) == 1
    extended = glm.extend(Snapshot([glm.user], ANSWERED), [THANKED], SILENT)
    assert text(glm, extended.ids) == "\nThanks. And you?/nothink<|assistant|>\n<think></think>"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"a": [1, {"b": "ü"}], "c": None, "d": True, "e": -1.5},
        {"a": "two\nlines", "b": "</arg_value>\n</tool_call>", "c": ""},
    ],
)
def test_arguments_come_back_as_they_were(glm: GlmRenderer, arguments: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", **arguments)]}
    reply = glm.parse(sampled(glm, message))
    assert plain(reply.message) == plain(message)
    assert reply.ill_formed is None


@pytest.mark.parametrize(
    ("said", "raw"),
    [
        ("<tool_call>f", "{"),
        (
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
            "<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        ),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>", "<arg_key>a</arg_key>\n<arg_value>1"),
        ('<tool_call>f\n{"a": 1}</tool_call>', '{"a": 1}'),
        (
            "<tool_call>f\n<arg_key>a</arg_key>hm<arg_value>1</arg_value></tool_call>",
            "<arg_key>a</arg_key>hm<arg_value>1",
        ),
    ],
)
def test_calls_that_are_broken_have_raw_arguments(glm: GlmRenderer, said: str, raw: str) -> None:
    reply = glm.parse(ids_of(glm, f"\n<think></think>\n{said}"))
    (found,) = reply.message["tool_calls"]
    assert found["function"]["name"] == "f"
    assert found["function"]["arguments"].startswith(raw)
    assert reply.ill_formed is not None


def test_a_call_without_a_name_stays_text(glm: GlmRenderer) -> None:
    reply = glm.parse(ids_of(glm, "x<tool_call><arg_key>a</arg_key></tool_call>"))
    assert reply.message["content"] == "x<tool_call><arg_key>a</arg_key></tool_call>"
    assert reply.ill_formed == "a call without a name"


def test_a_last_reply_of_a_transcript_ends_where_a_user_would_begin(glm: GlmRenderer) -> None:
    row = glm.transcript(CONVERSATION[:-1], TOOLS)
    assert glm.codec.token_text(int(row.token_ids[-1])) == "<|user|>"
    trained = [int(token) for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained == [*sampled(glm, CALLED), *sampled(glm, ANSWERED)]
    assert row.token_ids.tolist().count(glm.observation) == 1
