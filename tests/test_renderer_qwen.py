"""Qwen's families, with Qwen's own tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.renderer.families.qwen import (
    Qwen3InstructRenderer,
    Qwen3Renderer,
    Qwen3ThinkingRenderer,
    Qwen25Renderer,
    Qwen35Renderer,
)
from palestra.server.renderer.types import RenderOptions, Snapshot
from tests.renderer_cases import ASKED, CALLED, CONVERSATION, RESULTS, THANKED, TOOLS, call, for_family, plain, play
from tests.tokenizers import codec, qwen_folder

SILENT = RenderOptions(thinking=False)
EMPTY_BLOCK = [151667, 271, 151668, 271]
SYSTEM = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "weather", "description": "Looks out of the window.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}\n'
    '{"type": "function", "function": {"name": "calculator", "description": "Evaluates.", "parameters": '
    '{"type": "object", "properties": {"expression": {"type": "string"}}}}}\n'
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
TURNS = (
    "<|im_start|>user\nWeather in Zürich, and 1+2?<|im_end|>\n<|im_start|>assistant\n"
    "<think>\nTwo calls.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\nrain <|im_end|>\n</tool_response>\n"
    "<tool_response>\n3\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\nBoth are known.\n</think>\n\nRain, and 3.<|im_end|>\n"
    "<|im_start|>user\nThanks. And you?<|im_end|>\n<|im_start|>assistant\n"
)
WITHOUT_REASONING = TURNS.replace("<think>\nTwo calls.\n</think>\n\n", "").replace(
    "<think>\nBoth are known.\n</think>\n\n", ""
)
XML_CALLS = (
    "\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n"
    "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+2\n</parameter>\n</function>\n</tool_call><|im_end|>"
)


@pytest.fixture(scope="module")
def qwen3() -> Qwen3Renderer:
    return Qwen3Renderer(codec(qwen_folder))


@pytest.fixture(scope="module")
def qwen35() -> Qwen35Renderer:
    return Qwen35Renderer(codec(qwen_folder))


def text(renderer: Qwen25Renderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def ids_of(renderer: Qwen25Renderer, said: str) -> list[int]:
    """Ids of a completion in which marks are marks."""
    return renderer.codec.encode(renderer.codec.wording(said))


# Tokens in, tokens out.


def test_sampled_tokens_stand_in_the_next_prompt_as_they_were_sampled(qwen3: Qwen3Renderer) -> None:
    """A split that no tokenizer gives ("H" + "AVING") and compact JSON: 51 ids; rendering again would give 55."""
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    prompt = qwen3.render(asked)
    assert prompt.ids == [*(151644, 8948, 198, 82, 151645, 198, 151644, 872, 198, 80, 151645, 198, 151644, 77091, 198)]
    completion = [
        *(151667, 198, 39, 83722, 198, 151668, 271, 151657, 198, 4913, 606, 3252, 69, 2198, 16370, 22317, 64, 788),
        *(16, 11248, 151658, 151645),
    ]
    reply = qwen3.parse(completion)
    assert reply.message["reasoning_content"] == "HAVING"
    assert reply.message["content"] is None
    assert reply.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    results = [{"role": "tool", "content": "ok"}]
    extension = qwen3.extend(Snapshot(completion, reply.message), results)
    assert extension.ids == [*(198, 151644, 872, 198, 151665, 198, 562, 198, 151666, 151645, 198, 151644, 77091, 198)]
    assert len([*prompt.ids, *completion, *extension.ids]) == 51
    again = qwen3.render([*asked, reply.message, *results]).ids
    assert len(again) == 55
    assert again[:17] == [*prompt.ids, *completion][:17]
    assert again[17:19] == [72239, 1718]


def test_special_text_is_spelled_out_in_qwen_s_own_tokens(qwen3: Qwen3Renderer) -> None:
    ids = qwen3.render([{"role": "user", "content": "a <|im_end|>"}]).ids
    assert ids == [151644, 872, 198, 64, 82639, 318, 6213, 91, 29, 151645, 198, 151644, 77091, 198]


# Whole conversations.


def test_a_conversation_with_two_tools_in_qwen3(qwen3: Qwen3Renderer) -> None:
    assert text(qwen3, qwen3.render(CONVERSATION, TOOLS).ids) == SYSTEM + TURNS
    assert play(qwen3, CONVERSATION).ids == qwen3.render(CONVERSATION, TOOLS).ids


def test_a_conversation_with_two_tools_in_qwen3_instruct() -> None:
    renderer = Qwen3InstructRenderer(codec(qwen_folder))
    assert text(renderer, renderer.render(CONVERSATION, TOOLS).ids) == SYSTEM + WITHOUT_REASONING
    assert renderer.render(ASKED[1:]).ids == renderer.render(ASKED[1:], (), SILENT).ids


def test_a_conversation_with_two_tools_in_qwen25() -> None:
    renderer = Qwen25Renderer(codec(qwen_folder))
    assert text(renderer, renderer.render(CONVERSATION, TOOLS).ids) == SYSTEM + WITHOUT_REASONING
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert text(renderer, renderer.render(ASKED[1:2]).ids).startswith(f"<|im_start|>system\n{default}<|im_end|>\n")
    assert text(renderer, renderer.render(ASKED[1:2], TOOLS).ids).startswith(SYSTEM[:150].replace("Be brief.", default))


def test_a_conversation_with_two_tools_in_qwen3_thinking() -> None:
    renderer = Qwen3ThinkingRenderer(codec(qwen_folder))
    prompt = renderer.render(CONVERSATION, TOOLS)
    assert text(renderer, prompt.ids) == SYSTEM + TURNS + "<think>\n"
    assert prompt.ids[len(prompt.ids) - prompt.opened :] == [151667, 198]
    assert text(renderer, play(renderer, CONVERSATION).ids) == SYSTEM + TURNS + "<think>\n"
    assert "<think>" not in text(renderer, renderer.render(for_family("", CONVERSATION), TOOLS).ids)[:-8]


def test_a_conversation_with_two_tools_in_qwen35(qwen35: Qwen35Renderer) -> None:
    got = text(qwen35, qwen35.render(CONVERSATION, TOOLS).ids)
    system, turns = got.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n")
    assert json.dumps(TOOLS[0]) + "\n" + json.dumps(TOOLS[1]) + "\n</tools>\n\nIf you choose" in system
    assert system.endswith("function calls\n</IMPORTANT>\n\nBe brief.")
    before, after = TURNS.split('\n<tool_call>\n{"name": "weather"')
    assert turns == before + "\n" + XML_CALLS + after.split("<|im_end|>", 1)[1] + "<think>\n"
    assert text(qwen35, play(qwen35, CONVERSATION).ids) == got


# Thinking.


def test_without_thinking_the_prompt_holds_qwen3_s_empty_block(qwen3: Qwen3Renderer, qwen35: Qwen35Renderer) -> None:
    for renderer in (qwen3, qwen35):
        prompt = renderer.render(ASKED, (), SILENT)
        assert prompt.ids[-4:] == EMPTY_BLOCK
        assert prompt.opened == 4
        following = renderer.extend(Snapshot([151645], {}, EMPTY_BLOCK), [THANKED], SILENT)
        assert following.ids[-4:] == EMPTY_BLOCK


def test_qwen35_gives_past_replies_without_reasoning_an_empty_block(qwen35: Qwen35Renderer) -> None:
    ids = qwen35.render(for_family("", CONVERSATION), TOOLS).ids
    assert text(qwen35, ids).count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2


def test_a_forced_call_does_not_begin_inside_reasoning(qwen35: Qwen35Renderer) -> None:
    prompt = qwen35.render(ASKED, TOOLS, RenderOptions(call="weather"))
    opened = text(qwen35, prompt.ids[len(prompt.ids) - prompt.opened :])
    assert opened == "<think>\n\n</think>\n\n<tool_call>\n<function=weather>\n"
    assert text(qwen35, prompt.ids).endswith(opened)


# Replies.


def test_parallel_calls_stay_in_order_and_reasoning_is_kept(qwen3: Qwen3Renderer) -> None:
    blocks = "".join(f'<tool_call>\n{{"name": "{n}", "arguments": {{"x": "ü"}}}}\n</tool_call>\n' for n in "abc")
    reply = qwen3.parse(ids_of(qwen3, f"<think>\nhm\n</think>\n\n{blocks}<|im_end|>"))
    assert plain(reply.message) == {"reasoning": "hm", "calls": [(n, {"x": "ü"}) for n in "abc"]}
    assert reply.message["content"] is None


def test_text_around_calls_and_before_reasoning_is_kept(qwen3: Qwen3Renderer) -> None:
    said = 'a<think>b</think>c<tool_call>{"name": "f", "arguments": {}}</tool_call>d'
    assert plain(qwen3.parse(ids_of(qwen3, said)).message) == {"content": "acd", "reasoning": "b", "calls": [("f", {})]}


@pytest.mark.parametrize("inside", ["", "no call", '{"arguments": {}}', '{"name": 3}', "[1]"])
def test_a_block_that_holds_no_call_stays_text(qwen3: Qwen3Renderer, inside: str) -> None:
    said = f"x <tool_call>{inside}</tool_call> y"
    reply = qwen3.parse(ids_of(qwen3, said))
    assert reply.message == {"role": "assistant", "content": said}
    assert reply.ill_formed is not None


@pytest.mark.parametrize(
    ("arguments", "spelled"),
    [
        ({"a": [1, {"b": "ü"}], "c": {"d": None}}, '<parameter=a>\n[1, {"b": "ü"}]\n</parameter>\n'),
        ({"a": True, "b": None}, "<parameter=a>\nTrue\n</parameter>\n<parameter=b>\nNone\n</parameter>\n"),
        ({"a": "two\nlines\n", "b": " "}, "<parameter=a>\ntwo\nlines\n\n</parameter>\n"),
        ({"a": "</parameter>\n</function>", "b": 1.5}, "<parameter=a>\n</parameter>\n</function>\n</parameter>\n"),
        ({"a": ""}, "<parameter=a>\n\n</parameter>\n"),
        ({}, "<function=f>\n</function>\n"),
    ],
)
def test_xml_arguments_come_back_as_they_were(qwen35: Qwen35Renderer, arguments: Any, spelled: str) -> None:
    body = qwen35.codec.encode(qwen35.call_body(call("f", **arguments)))
    assert spelled in text(qwen35, body)
    (found,), wrong = qwen35.read_call(body, True)
    assert json.loads(found["function"]["arguments"]) == arguments
    assert wrong is None


@pytest.mark.parametrize(
    ("said", "raw"),
    [
        ("<function=f>\n<parameter=a>\n1\n</parameter>\n", "<parameter=a>\n1\n</parameter>"),
        ("<function=f>\n<parameter=a>\n1\n</function>", "<parameter=a>\n1"),
        ("<function=f>\nhm\n<parameter=a>\n1\n</parameter>\n</function>", "hm\n<parameter=a>\n1\n</parameter>"),
        ("<function=f>", "{"),
    ],
)
def test_xml_calls_that_are_broken_have_raw_arguments(qwen35: Qwen35Renderer, said: str, raw: str) -> None:
    reply = qwen35.parse(ids_of(qwen35, f"</think>\n\n<tool_call>\n{said}\n</tool_call>"), [151667, 198])
    (found,) = reply.message["tool_calls"]
    assert found["function"] == {"name": "f", "arguments": raw}
    assert reply.ill_formed is not None
    assert qwen35.call_body(found) == [f"\n<function=f>\n{raw}\n</function>\n"]


def test_qwen35_trims_what_its_template_trims(qwen35: Qwen35Renderer) -> None:
    loose = [{**m, "content": f" \n{m['content']}\n "} for m in [*ASKED, THANKED]]
    assert qwen35.render(loose).ids == qwen35.render([*ASKED, THANKED]).ids
    last = Snapshot([151645], CALLED)
    result = [{**RESULTS[1], "content": " 3\n"}]
    assert qwen35.extend(last, result).ids == qwen35.extend(last, RESULTS[1:]).ids
