"""ChatML, `<|im_start|>role\\n ... <|im_end|>\\n`, with our own way to list tools: SmolLM2.

Tools are listed in the system turn in the form of their calls, a call is a bare JSON object `{"name": ..., "arguments": {...}}`, a result
is a turn of the role `tool`. Without tools it equals SmolLM2's own template id for id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.blocks import NO_JSON, Found
from palestra.server.renderer.text import arguments_text, is_name, json_text, make_call, strip_end, text_of
from palestra.server.renderer.tokens import Piece, TokenCodec
from palestra.server.renderer.types import Message, ParsedReply, RenderOptions, ToolSpec

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system turn that SmolLM2's own template puts in where a conversation has none."""


class ChatMLRenderer(FamilyRenderer):
    """SmolLM2, and the base of the families that share its turns."""

    family: ClassVar[str] = "chatml"
    separator: Sequence[Piece] = ("\n",)

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.start, self.end = codec.special_id("<|im_start|>"), codec.special_id("<|im_end|>")
        endoftext = codec.special.get("<|endoftext|>")
        self.stop_ids = (self.end,) if endoftext is None else (self.end, endoftext)

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        text = SMOLLM2_SYSTEM if system is None and not tools else system or ""
        if tools:
            listed = "\n".join(_skeleton(tool["function"]) for tool in tools)
            text = f"{text}\nTools:\n{listed}".lstrip("\n")
        return self.plain_turn("system", text)

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        return [self.start, f"{role}\n{text}", self.end, "\n"]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        return [piece for m in results for piece in self.plain_turn("tool", text_of(m))]

    def header(self) -> list[Piece]:
        return [self.start, "assistant\n"]

    def assistant_body(self, message: Message) -> list[Piece]:
        calls = message.get("tool_calls") or ()
        parts = [text_of(message)] if message.get("content") else []
        parts += [f'{{"name": {json_text(c["function"]["name"])}, "arguments": {arguments_text(c)}}}' for c in calls]
        return ["\n".join(parts)]

    def call_opening(self, name: str) -> list[Piece]:
        return [f'{{"name": {json_text(name)}, "arguments": ' if name else '{"name": "']

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        text = self.codec.decode([*opened, *strip_end(ids, self.stop_ids)])
        calls, wrong = _bare_calls(text)
        if calls:
            return ParsedReply({"role": "assistant", "content": None, "tool_calls": calls}, wrong)
        return ParsedReply({"role": "assistant", "content": text}, wrong)


def _skeleton(function: Any) -> str:
    """`{"name": "calculator", "arguments": {"expression": "string"}} # Evaluates an expression.`

    The call's own form, with types in place of values: on a 135M model one example then gives a right call over twice as often as a
    signature such as `calculator(expression: string)` does.
    """
    properties = function.get("parameters", {}).get("properties", {})
    types = {name: schema.get("type", "any") for name, schema in properties.items()}
    call = json_text({"name": function["name"], "arguments": types})
    about = (function.get("description") or "").split("\n")[0]
    return f"{call} # {about}" if about else call


_OPENING = re.compile(r'\{"name": ?"([^"\\]{1,64})", ?"arguments": ?')


def _bare_calls(text: str) -> Found:
    """Calls, where the whole text is JSON objects with a name and an object of arguments; else nothing. The last one may be cut or broken
    after its opening: then its arguments are raw."""
    decoder = json.JSONDecoder(strict=False)
    calls: list[dict[str, Any]] = []
    text = text.strip()
    looks = NO_JSON if text.startswith('{"name":') else None
    at = 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
            if not _is_call(value):
                return [], looks
            calls.append(make_call(value["name"], json_text(value["arguments"])))
        except (ValueError, RecursionError):
            opening = _OPENING.match(text, at)
            if opening is None or not is_name(opening[1]):
                return [], looks
            return [*calls, make_call(opening[1], text[opening.end() :] or "{")], NO_JSON
        while end < len(text) and text[end].isspace():
            end += 1
        at = end
    return calls, None


def _is_call(value: Any) -> bool:
    """Whether a JSON value is a call and nothing else."""
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        return False
    return is_name(value["name"]) and isinstance(value["arguments"], dict)
