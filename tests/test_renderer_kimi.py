"""Kimi-K2: a section of calls, under the ids that the model gave them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.renderer.families.kimi import KimiRenderer
from palestra.server.renderer.types import RenderOptions, Snapshot
from tests.renderer_cases import (
    ASKED,
    CALLED,
    CONVERSATION,
    RESULTS,
    THANKED,
    TOOLS,
    call,
    for_family,
    plain,
    sampled,
    tiny,
)

OPENING = (
    "<|im_system|>tool_declare<|im_middle|>"
    '[{"function":{"description":"Looks out of the window.","name":"weather","parameters":{"properties":'
    '{"city":{"type":"string"},"days":{"type":"integer"}},"type":"object"}},"type":"function"},'
    '{"function":{"description":"Evaluates.","name":"calculator","parameters":{"properties":'
    '{"expression":{"type":"string"}},"type":"object"}},"type":"function"}]<|im_end|>'
)
CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Zürich", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.calculator:1'
    '<|tool_call_argument_begin|>{"expression": "1+2"}<|tool_call_end|><|tool_calls_section_end|>'
)
TURNS = (
    "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Weather in Zürich, and 1+2?<|im_end|>"
    f"<|im_assistant|>assistant<|im_middle|><think>Two calls.</think>Let me look.{CALLS}<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nrain <|im_end|><|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.calculator:1\n3<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think>Both are known.</think>Rain, and 3.<|im_end|>"
    "<|im_user|>user<|im_middle|>Thanks. And you?<|im_end|><|im_assistant|>assistant<|im_middle|>"
)


def make(name: str, factory: pytest.TempPathFactory) -> KimiRenderer:
    renderer = tiny(name, factory.mktemp(name))
    assert isinstance(renderer, KimiRenderer)
    return renderer


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> KimiRenderer:
    return make("kimi", tmp_path_factory)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> KimiRenderer:
    return make("kimi-thinking", tmp_path_factory)


def text(renderer: KimiRenderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def ids_of(renderer: KimiRenderer, said: str) -> list[int]:
    return renderer.codec.encode(renderer.codec.wording(said))


def test_a_conversation_with_two_tools(kimi: KimiRenderer, thinking: KimiRenderer) -> None:
    assert text(thinking, thinking.render(CONVERSATION, TOOLS).ids) == OPENING + TURNS
    without = TURNS.replace("<think>Two calls.</think>", "").replace("<think>Both are known.</think>", "")
    assert text(kimi, kimi.render(CONVERSATION, TOOLS).ids) == OPENING + without


def test_the_default_system_turn(kimi: KimiRenderer, thinking: KimiRenderer) -> None:
    default = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
    assert text(kimi, kimi.render(ASKED[1:]).ids).startswith(f"{default}\n<|im_user|>")
    assert text(thinking, thinking.render(ASKED[1:], TOOLS).ids).startswith(f"{OPENING}{default}<|im_user|>")


def test_a_call_s_id_is_the_model_s_and_names_the_result(kimi: KimiRenderer) -> None:
    reply = kimi.parse(ids_of(kimi, CALLS.replace("weather:0", "weather:17") + "<|im_end|>"))
    assert [c["id"] for c in reply.message["tool_calls"]] == ["functions.weather:17", "functions.calculator:1"]
    assert plain(reply.message) == {"calls": plain(CALLED)["calls"]}
    result = {"role": "tool", "tool_call_id": "functions.weather:17", "content": "rain", "name": "weather"}
    extension = kimi.extend(Snapshot([kimi.end], reply.message), [result])
    assert text(kimi, extension.ids).startswith(
        "<|im_system|>weather<|im_middle|>## Return of functions.weather:17\nrain<|im_end|>"
    )
    nameless = kimi.extend(Snapshot([kimi.end], reply.message), [{"role": "tool", "content": "rain"}])
    assert "## Return of functions.weather:17\n" in text(kimi, nameless.ids)


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions.a.b:3", "a.b"), ("f:0", "f"), ("f", "f"), (" functions.f:0\n", "f")]
)
def test_the_tool_s_name_is_in_the_id(kimi: KimiRenderer, call_id: str, name: str) -> None:
    said = CALLS.replace("functions.weather:0", call_id)
    first = kimi.parse(ids_of(kimi, said)).message["tool_calls"][0]
    assert first["function"]["name"] == name
    assert first["id"] == call_id.strip()


def test_arguments_stay_as_they_were_written(kimi: KimiRenderer) -> None:
    said = {**CALLED, "tool_calls": [{**call("f"), "function": {"name": "f", "arguments": '{"a":1e3}'}}]}
    reply = kimi.parse(sampled(kimi, for_family("kimi", [said])[0]))
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"a":1e3}'


@pytest.mark.parametrize(
    ("cut", "names", "close"),
    [
        (
            CALLS.index("<|tool_call_argument_begin|>"),
            ["weather"],
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        ),
        (CALLS.index('"days"'), ["weather"], "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"),
        (CALLS.index("<|tool_call_begin|>", 50), ["weather"], "<|tool_calls_section_end|><|im_end|>"),
        (CALLS.index("<|tool_calls_section_end|>"), ["weather", "calculator"], "<|tool_calls_section_end|><|im_end|>"),
        (len(CALLS), ["weather", "calculator"], "<|im_end|>"),
    ],
)
def test_a_section_that_is_cut_is_closed(kimi: KimiRenderer, cut: int, names: list[str], close: str) -> None:
    completion = ids_of(kimi, CALLS[:cut])
    reply = kimi.parse(completion)
    assert [c["function"]["name"] for c in reply.message["tool_calls"]] == names
    assert (reply.ill_formed is None) == ("call_end" not in close)
    extension = kimi.extend(Snapshot(completion, reply.message), RESULTS[: len(names)])
    assert text(kimi, extension.ids).startswith(close + "<|im_system|>tool")
    assert extension.close_tokens == close.count("<")


def test_a_section_without_calls_stays_text(kimi: KimiRenderer) -> None:
    said = "x<|tool_calls_section_begin|>hm<|tool_calls_section_end|>"
    assert kimi.parse(ids_of(kimi, said)).message == {"role": "assistant", "content": said}
    said = "<|tool_calls_section_begin|><|tool_call_begin|>:0\n\n<|tool_call_end|><|tool_calls_section_end|>"
    reply = kimi.parse(ids_of(kimi, said.replace(":0", "")))
    assert reply.ill_formed == "a call without a name"
    assert not reply.has_calls


def test_a_forced_call_lets_the_model_count(thinking: KimiRenderer) -> None:
    prompt = thinking.render(ASKED, TOOLS, RenderOptions(call="weather"))
    opened = list(prompt.ids[len(prompt.ids) - prompt.opened :])
    begun = "<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:"
    assert text(thinking, opened) == begun
    completion = ids_of(thinking, '4<|tool_call_argument_begin|>{"city": "x"}<|tool_call_end|>')
    reply = thinking.parse(completion, opened)
    assert reply.message["tool_calls"][0]["id"] == "functions.weather:4"
    assert json.loads(reply.message["tool_calls"][0]["function"]["arguments"]) == {"city": "x"}
    extension = thinking.extend(Snapshot(completion, reply.message, opened), [THANKED])
    assert text(thinking, extension.ids).startswith("<|tool_calls_section_end|><|im_end|><|im_user|>")


def test_ids_of_another_maker_do_not_hide_the_tool_s_name(kimi: KimiRenderer) -> None:
    """The id is all that names the tool in a prompt: history that another model wrote gets ids of this model's form."""
    foreign = [{**made, "id": f"call_{n}"} for n, made in enumerate(CALLED["tool_calls"])]
    results = [{**result, "tool_call_id": f"call_{n}"} for n, result in enumerate(RESULTS)]
    said = text(kimi, kimi.render([*ASKED, {**CALLED, "tool_calls": foreign}, *results[::-1]], TOOLS).ids)
    assert CALLS in said
    assert said.index("Return of functions.calculator:1\n3") < said.index("Return of functions.weather:0")
    assert "call_" not in said.replace("tool_call_", "")
