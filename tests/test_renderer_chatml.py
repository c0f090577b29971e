"""SmolLM2's ChatML, with SmolLM2's own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.server.renderer.families.chatml import ChatMLRenderer
from palestra.server.renderer.types import Snapshot
from tests.renderer_cases import ANSWERED, CONVERSATION, RESULTS, TOOLS, call, for_family, plain, play, tool
from tests.tokenizers import codec, smollm2_folder

EVALUATE = [tool("calculator", "Evaluates.", expression="string")]


@pytest.fixture(scope="module")
def chatml() -> ChatMLRenderer:
    return ChatMLRenderer(codec(smollm2_folder))


def text(renderer: ChatMLRenderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def test_without_tools_it_is_smollm2_s_own_template(chatml: ChatMLRenderer) -> None:
    assert text(chatml, chatml.render([{"role": "user", "content": "hi"}]).ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_with_two_tools(chatml: ChatMLRenderer) -> None:
    messages = for_family("chatml", CONVERSATION)
    rendered = chatml.render(messages, TOOLS).ids
    assert text(chatml, rendered) == (
        "<|im_start|>system\nBe brief.\nTools:\n"
        '{"name": "weather", "arguments": {"city": "string", "days": "integer"}} # Looks out of the window.\n'
        '{"name": "calculator", "arguments": {"expression": "string"}} # Evaluates.<|im_end|>\n'
        "<|im_start|>user\nWeather in Zürich, and 1+2?<|im_end|>\n<|im_start|>assistant\n"
        '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        '{"name": "calculator", "arguments": {"expression": "1+2"}}<|im_end|>\n'
        "<|im_start|>tool\nrain <|im_end|><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\nRain, and 3.<|im_end|>\n<|im_start|>user\nThanks. And you?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered.count(chatml.end) == 7
    assert play(chatml, messages).ids == list(rendered)


def test_tools_without_a_system_message(chatml: ChatMLRenderer) -> None:
    got = text(chatml, chatml.render([{"role": "user", "content": "q"}], EVALUATE).ids)
    listed = '{"name": "calculator", "arguments": {"expression": "string"}} # Evaluates.'
    assert got.startswith(f"<|im_start|>system\nTools:\n{listed}<|im_end|>\n")


def test_a_turn_that_ended_by_the_end_of_text_is_ended(chatml: ChatMLRenderer) -> None:
    end_of_text = chatml.codec.special_id("<|endoftext|>")
    extension = chatml.extend(Snapshot([*chatml.codec.encode_text("x"), end_of_text], {}), RESULTS[1:])
    assert extension.close_tokens == 0
    assert text(chatml, extension.ids) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_bare_calls_are_read_with_their_outer_white_space(chatml: ChatMLRenderer) -> None:
    said = '\n{"name": "calculator", "arguments": {"expression": "1+2"}} {"name":"f","arguments":{}}\n'
    reply = chatml.parse([*chatml.codec.encode_text(said), chatml.end])
    assert plain(reply.message) == {"calls": [("calculator", {"expression": "1+2"}), ("f", {})]}
    assert reply.message["content"] is None
    assert reply.ill_formed is None


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("42", False),
        ('{"a": 1}', False),
        ("[" * 5000, False),
        ('{"name": 3, "arguments": {}}', True),
        ('{"name": "f", "arguments": []}', True),
        ('{"name": "f", "arguments": {}, "more": 1}', True),
        ('{"name": "f", "arguments": {}} is what I would do', True),
        ('{"name": "", "arguments": {}}', True),
        ('{"name": " ", "arguments": {}}', True),
        ('{"name": " ", "arguments": {', True),
        ('{"name": "calc', True),
    ],
)
def test_text_that_is_no_call_stays_text(chatml: ChatMLRenderer, said: str, wrong: bool) -> None:
    reply = chatml.parse([*chatml.codec.encode_text(said), chatml.end])
    assert reply.message == {"role": "assistant", "content": said}
    assert (reply.ill_formed is not None) == wrong


def test_a_last_call_that_is_broken_has_raw_arguments(chatml: ChatMLRenderer) -> None:
    whole = '{"name": "f", "arguments": {"a": 1}}\n'
    reply = chatml.parse(chatml.codec.encode_text(whole + '{"name": "calculator", "arguments": {"expression": "1+'))
    first, second = reply.message["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert second["function"] == {"name": "calculator", "arguments": '{"expression": "1+'}
    assert first["id"] != second["id"]
    assert reply.ill_formed == "a call that is no JSON"


def test_text_beside_a_call_is_rendered_before_it(chatml: ChatMLRenderer) -> None:
    said = {**ANSWERED, "tool_calls": [call("f", a=1)]}
    assert chatml.assistant_body(said) == ['Rain, and 3.\n{"name": "f", "arguments": {"a": 1}}']
