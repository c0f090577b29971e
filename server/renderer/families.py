"""The two chat families: plain ChatML with our own tool template, and Qwen3's.

ChatML (SmolLM2) has no tools of its own: tools are listed in the system turn in the form of their calls, a call is a bare JSON object
`{"name": ..., "arguments": {...}}`, a result is a turn of the role `tool`. Qwen3 follows the template that its models were trained with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.server.renderer.base import (
    Message,
    ParsedReply,
    Renderer,
    ToolSpec,
    arguments_text,
    make_call,
    strip_end,
    text_of,
)
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.types import RenderError

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system turn that SmolLM2's own template puts in where a conversation has none."""


class ChatMLRenderer(Renderer):
    """SmolLM2's ChatML. Without tools it equals the model's own template id for id."""

    family = "chatml"

    def system_pieces(self, system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
        text = SMOLLM2_SYSTEM if system is None and not tools else system or ""
        if tools:
            listed = "\n".join(_skeleton(tool["function"]) for tool in tools)
            text = f"{text}\nTools:\n{listed}".lstrip("\n")
        return [self.start, f"system\n{text}", self.end, "\n"]

    def tool_result_pieces(self, results: Sequence[Message]) -> list[Piece]:
        return [piece for m in results for piece in (self.start, f"tool\n{text_of(m)}", self.end, "\n")]

    def assistant_body(self, message: Message) -> list[Piece]:
        calls = message.get("tool_calls") or ()
        parts = [text_of(message)] if message.get("content") else []
        parts += [
            f'{{"name": {json.dumps(c["function"]["name"], ensure_ascii=False)}, "arguments": {arguments_text(c)}}}'
            for c in calls
        ]
        return ["\n".join(parts)]

    def parse(self, ids: Sequence[int]) -> ParsedReply:
        text = self.codec.decode(strip_end(ids, self.stop_ids))
        calls = _bare_calls(text)
        if calls:
            return ParsedReply({"role": "assistant", "content": None, "tool_calls": calls}, True)
        return ParsedReply({"role": "assistant", "content": text}, False)


def _skeleton(function: Any) -> str:
    """`{"name": "calculator", "arguments": {"expression": "string"}} # Evaluates an expression.`

    The call's own form, with types in place of values: on a 135M model one example then gives a right call over twice as often as a
    signature such as `calculator(expression: string)` does.
    """
    properties = function.get("parameters", {}).get("properties", {})
    types = {name: schema.get("type", "any") for name, schema in properties.items()}
    call = json.dumps({"name": function["name"], "arguments": types}, ensure_ascii=False)
    about = (function.get("description") or "").split("\n")[0]
    return f"{call} # {about}" if about else call


def _bare_calls(text: str) -> list[dict[str, Any]]:
    """Calls, where the whole text is one or more JSON objects with a name and an object of arguments; else nothing."""
    decoder = json.JSONDecoder(strict=False)
    calls: list[dict[str, Any]] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        if not (
            isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)
        ):
            return []
        if value.keys() != {"name", "arguments"}:
            return []
        calls.append(make_call(value["name"], json.dumps(value["arguments"], ensure_ascii=False)))
        rest = rest[end:].strip()
    return calls


class Qwen3Renderer(Renderer):
    """Qwen3's template: tools as JSON in the system turn, calls and results between special tokens, reasoning in a think block."""

    family = "qwen3"

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.call, self.call_end = codec.special_id("<tool_call>"), codec.special_id("</tool_call>")
        self.response, self.response_end = codec.special_id("<tool_response>"), codec.special_id("</tool_response>")
        self.think, self.think_end = codec.special_id("<think>"), codec.special_id("</think>")

    def system_pieces(self, system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
        if not tools:
            return [] if system is None else [self.start, f"system\n{system}", self.end, "\n"]
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        head = f"{system}\n\n" if system else ""
        return [
            self.start,
            f"system\n{head}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within ",
            self.call,
            self.call_end,
            " XML tags:\n",
            self.call,
            '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
            self.call_end,
            self.end,
            "\n",
        ]

    def tool_result_pieces(self, results: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [self.start, "user"]
        for message in results:
            pieces += ["\n", self.response, f"\n{text_of(message)}\n", self.response_end]
        return [*pieces, self.end, "\n"]

    def assistant_body(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        if reasoning := message.get("reasoning_content"):
            pieces += [self.think, f"\n{reasoning.strip()}\n", self.think_end, "\n\n"]
        content = text_of(message)
        pieces.append(content)
        for number, call in enumerate(message.get("tool_calls") or ()):
            if number or content:
                pieces.append("\n")
            name = json.dumps(call["function"]["name"], ensure_ascii=False)
            pieces += [self.call, f'\n{{"name": {name}, "arguments": {arguments_text(call)}}}\n', self.call_end]
        return [BREAK, *pieces]

    def parse(self, ids: Sequence[int]) -> ParsedReply:
        rest = list(strip_end(ids, self.stop_ids))
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if self.think_end in rest:
            at = rest.index(self.think_end)
            opened = rest.index(self.think) + 1 if self.think in rest[:at] else 0
            message["reasoning_content"] = self.codec.decode(rest[opened:at]).strip("\n")
            rest = rest[at + 1 :]
        text, calls = self._split_calls(rest)
        if calls:
            message["tool_calls"] = calls
        content = text.strip("\n") if calls or "reasoning_content" in message else text
        message["content"] = content if content or not calls else None
        return ParsedReply(message, bool(calls))

    def _split_calls(self, ids: Sequence[int]) -> tuple[str, list[dict[str, Any]]]:
        """Text outside the call blocks, and the calls; one scan, and a block that is no call stays text."""
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        at = 0
        while at < len(ids):
            try:
                start = ids.index(self.call, at)
            except ValueError:
                text.append(self.codec.decode(ids[at:]))
                break
            text.append(self.codec.decode(ids[at:start]))
            try:
                end = ids.index(self.call_end, start)
            except ValueError:
                end = len(ids)
            body = self.codec.decode(ids[start + 1 : end])
            call = _call_of(body)
            if call is None:
                text.append(self.codec.decode(ids[start : end + 1]))
            else:
                calls.append(call)
            at = end + 1
        return "".join(text), calls


_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


def _call_of(body: str) -> dict[str, Any] | None:
    """A call from the text of one block. JSON that is broken or cut still names its tool where it can, and hands over its raw
    arguments: the environment answers with an error under the same call id, and the episode goes on."""
    try:
        value = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        name, arguments = _NAME.search(body), _ARGUMENTS.search(body)
        if name is None:
            return None
        raw = body[arguments.end() :].strip() if arguments else ""
        return make_call(name[1], raw or "{")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return make_call(value["name"], text)


def load_renderer(folder: Path) -> Renderer:
    """The renderer of a model folder, chosen by the special tokens that its tokenizer has.

    Raises:
        RenderError: no family fits, or there is no tokenizer.
    """
    codec = TokenCodec(folder)
    if {"<|im_start|>", "<tool_call>", "<tool_response>", "<think>"} <= codec.special.keys():
        return Qwen3Renderer(codec)
    if {"<|im_start|>", "<|im_end|>"} <= codec.special.keys():
        return ChatMLRenderer(codec)
    raise RenderError(f"{folder}: no chat family fits this tokenizer; known: chatml (SmolLM2), qwen3")
