"""The renderer: equal to the families' own templates where those are right, prefix-exact where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.server.renderer.base import Renderer
from palestra.server.renderer.families import ChatMLRenderer, Qwen3Renderer, load_renderer
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.types import RenderError
from tests.tiny import SPECIAL, save_tokenizer, train_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Renderer:
    folder = tmp_path_factory.mktemp("qwen")
    save_tokenizer(train_tokenizer(), folder)
    renderer = load_renderer(folder)
    assert isinstance(renderer, Qwen3Renderer)
    return renderer


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatMLRenderer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant system tool"], trainer)
    folder = tmp_path_factory.mktemp("chatml")
    save_tokenizer(tokenizer, folder)
    renderer = load_renderer(folder)
    assert isinstance(renderer, ChatMLRenderer)
    return renderer


def text(renderer: Renderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def test_chatml_matches_smollm2_template(chatml: ChatMLRenderer) -> None:
    got = text(chatml, chatml.render([{"role": "user", "content": "hi"}]))
    assert got == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_lists_tools_and_reads_bare_calls(chatml: ChatMLRenderer) -> None:
    got = text(chatml, chatml.render([{"role": "system", "content": "S"}, {"role": "user", "content": "q"}], TOOLS))
    listed = '{"name": "calculator", "arguments": {"expression": "string"}} # Evaluates.'
    assert got.startswith(f"<|im_start|>system\nS\nTools:\n{listed}<|im_end|>\n")
    ids = [*chatml.codec.encode_text('{"name": "calculator", "arguments": {"expression": "1+2"}}'), chatml.end]
    reply = chatml.parse(ids)
    (call,) = reply.message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "1+2"}'}
    assert reply.message["content"] is None


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "calculator", "arguments": {"expression": "1+2"',
        "42",
        '{"name": 3, "arguments": {}}',
        '{"a": 1}',
        "[" * 5000,
    ],
)
def test_chatml_text_that_is_no_call_stays_text(chatml: ChatMLRenderer, said: str) -> None:
    reply = chatml.parse([*chatml.codec.encode_text(said), chatml.end])
    assert not reply.has_calls
    assert reply.message == {"role": "assistant", "content": said}


def test_qwen3_matches_its_template(qwen: Qwen3Renderer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]},
        {"role": "tool", "content": "ok"},
        {"role": "tool", "content": "no"},
    ]
    got = text(qwen, qwen.render(messages))
    assert got == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nok\n</tool_response>\n<tool_response>\nno\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_special_text_in_content_is_spelled_out(qwen: Qwen3Renderer) -> None:
    literal = "a<|im_end|>b<tool_call>c"
    ids = qwen.render([{"role": "user", "content": literal}])
    assert ids.count(qwen.end) == 1
    assert qwen.call not in ids
    assert literal in text(qwen, ids)


def test_extension_supplies_what_the_template_puts_between_turns(qwen: Qwen3Renderer) -> None:
    extension = qwen.extend([{"role": "tool", "content": "ok"}], qwen.end)
    assert text(qwen, extension.ids) == (
        "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert extension.close_tokens == 0


def test_extension_closes_a_cut_turn(qwen: Qwen3Renderer) -> None:
    extension = qwen.extend([{"role": "user", "content": "go on"}], 300)
    assert extension.ids[0] == qwen.end
    assert extension.close_tokens == 1


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_extension_refuses_what_needs_a_fork(qwen: Qwen3Renderer, role: str) -> None:
    with pytest.raises(RenderError, match=role):
        qwen.extend([{"role": role, "content": "x"}], qwen.end)


def test_qwen3_reads_parallel_calls_in_order_and_keeps_reasoning(qwen: Qwen3Renderer) -> None:
    def block(name: str) -> list[int]:
        return [
            qwen.call,
            *qwen.codec.encode_text(f'\n{{"name": "{name}", "arguments": {{"x": "ü"}}}}\n'),
            qwen.call_end,
        ]

    ids = [
        qwen.think,
        *qwen.codec.encode_text("\nhm\n"),
        qwen.think_end,
        *block("a"),
        *block("b"),
        *block("c"),
        qwen.end,
    ]
    message = qwen.parse(ids).message
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["a", "b", "c"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": "ü"}
    assert message["reasoning_content"] == "hm"
    assert message["content"] is None


def test_qwen3_cut_arguments_are_a_call_with_raw_arguments(qwen: Qwen3Renderer) -> None:
    ids = [qwen.call, *qwen.codec.encode_text('\n{"name": "calculator", "arguments": {"expression": "12+')]
    (call,) = qwen.parse(ids).message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12+'}


def test_qwen3_text_that_spells_a_call_is_text(qwen: Qwen3Renderer) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert qwen.parse(qwen.codec.encode_text(said)).message == {"role": "assistant", "content": said}


def test_ten_thousand_blocks_are_one_scan(qwen: Qwen3Renderer) -> None:
    ids = [qwen.call, qwen.call_end] * 10_000 + [qwen.call]
    assert not qwen.parse(ids).has_calls


def test_transcript_is_what_rendering_and_extending_would_give(qwen: Qwen3Renderer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [
        {"role": "user", "content": "q"},
        call,
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "one"},
    ]
    row = qwen.transcript(messages, TOOLS)
    prompt = qwen.render(messages[:1], TOOLS)
    body = [*qwen.codec.encode(qwen.assistant_body(call)), qwen.end]
    after = list(qwen.extend(messages[2:3], qwen.end).ids)
    final = [*qwen.codec.encode_text("one"), qwen.end]
    assert row.token_ids.tolist() == prompt + body + after + final
    assert row.loss_mask.tolist() == [0] * len(prompt) + [1] * len(body) + [0] * len(after) + [1] * len(final)


def test_content_that_is_not_text_is_refused(qwen: Qwen3Renderer) -> None:
    with pytest.raises(RenderError, match="image_url"):
        qwen.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_missing_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"tokenizer\.json"):
        TokenCodec(tmp_path)
