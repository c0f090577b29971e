"""What the renderer's tests share: families on tiny tokenizers, a conversation with two tools, and a session played over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.families.chatml import ChatMLRenderer
from palestra.server.renderer.families.glm import GlmRenderer
from palestra.server.renderer.families.kimi import KimiRenderer
from palestra.server.renderer.families.minimax import MiniMaxRenderer
from palestra.server.renderer.families.qwen import (
    Qwen3InstructRenderer,
    Qwen3Renderer,
    Qwen3ThinkingRenderer,
    Qwen25Renderer,
    Qwen35Renderer,
)
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import Message, RenderOptions, Snapshot
from tests.tokenizers import added_codec

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN25 = (*CHATML, "<tool_call>", "</tool_call>")
QWEN3 = (*QWEN25, "<tool_response>", "</tool_response>", "<think>", "</think>")
GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "/nothink"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
MINIMAX = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")

FAMILIES: Mapping[str, tuple[Callable[[TokenCodec], FamilyRenderer], Sequence[str]]] = {
    "chatml": (ChatMLRenderer, CHATML),
    "qwen2.5": (Qwen25Renderer, QWEN25),
    "qwen3": (Qwen3Renderer, QWEN3),
    "qwen3-instruct": (Qwen3InstructRenderer, QWEN3),
    "qwen3-thinking": (Qwen3ThinkingRenderer, QWEN3),
    "qwen3.5": (Qwen35Renderer, QWEN3),
    "glm": (GlmRenderer, GLM),
    "kimi": (KimiRenderer, KIMI),
    "kimi-thinking": (KimiRenderer, (*KIMI, "<think>", "</think>")),
    "minimax": (MiniMaxRenderer, MINIMAX),
}
"""Family -> its class and the special tokens of its tokenizer."""
THINKING = ("qwen3", "qwen3-thinking", "qwen3.5", "glm", "kimi-thinking", "minimax")


def tiny(name: str, folder: Path) -> FamilyRenderer:
    """A family on a byte-level tokenizer with its special tokens, written to `folder`."""
    build, special = FAMILIES[name]
    return build(added_codec(special, folder))


def tool(name: str, about: str, **properties: str) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    tool("weather", "Looks out of the window.", city="string", days="integer"),
    tool("calculator", "Evaluates.", expression="string"),
]


def call(name: str, call_id: str = "", /, **arguments: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id or f"functions.{name}:0",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Zürich, and 1+2?"},
]
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning_content": "Two calls.",
    "tool_calls": [
        call("weather", city="Zürich", days=2),
        call("calculator", "functions.calculator:1", expression="1+2"),
    ],
}
RESULTS: list[dict[str, Any]] = [
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "rain <|im_end|>"},
    {"role": "tool", "tool_call_id": "functions.calculator:1", "content": "3"},
]
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "Rain, and 3.", "reasoning_content": "Both are known."}
THANKED: dict[str, Any] = {"role": "user", "content": "Thanks. And you?"}
CONVERSATION = [*ASKED, CALLED, *RESULTS, ANSWERED, THANKED]


def for_family(name: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without what the family has no place for: reasoning, and text beside bare calls."""
    kept = [{k: v for k, v in m.items() if k != "reasoning_content" or name in THINKING} for m in messages]
    return [{**m, "content": None} if name == "chatml" and m.get("tool_calls") else m for m in kept]


def sampled(renderer: FamilyRenderer, message: Message, options: RenderOptions | None = None) -> list[int]:
    """The completion that is this message: its turn without what the prompt has opened."""
    ids = renderer.codec.encode([*renderer.assistant_body(message), *renderer.turn_end(message)])
    opened = renderer.codec.encode(renderer.opened(options or RenderOptions()))
    assert ids[: len(opened)] == opened
    return ids[len(opened) :]


@dataclass
class Played:
    """A session as a gateway keeps it: all ids, and the prompts and completions in it."""

    ids: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)


def play(renderer: FamilyRenderer, messages: Sequence[Message], options: RenderOptions | None = None) -> Played:
    """Plays the conversation: each assistant message is what the model samples, each prompt the last ids and an extension."""
    done = Played()
    turns = [at for at, m in enumerate(messages) if m["role"] == "assistant"]
    last: Snapshot | None = None
    for at, until in zip([-1, *turns], [*turns, len(messages)], strict=True):
        new = messages[at + 1 : until]
        rendered = renderer.render(new, TOOLS, options) if last is None else renderer.extend(last, new, options)
        done.ids += rendered.ids
        done.prompts.append(list(done.ids))
        if until == len(messages):
            break
        completion = sampled(renderer, messages[until], options)
        opened = done.ids[len(done.ids) - rendered.opened :]
        reply = renderer.parse(completion, opened)
        assert reply.ill_formed is None
        done.replies.append(reply.message)
        done.completions.append(completion)
        done.ids += completion
        last = Snapshot(completion, reply.message, opened, TOOLS)
    return done


def plain(message: Message) -> dict[str, Any]:
    """A message for comparison: arguments as values, calls without their ids, only the keys that say something."""
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"] or "{}")) for c in message.get("tool_calls") or ()
    ]
    found = {"content": message.get("content") or "", "reasoning": message.get("reasoning_content"), "calls": calls}
    return {key: value for key, value in found.items() if value}
