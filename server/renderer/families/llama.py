"""Llama-3.1, 3.2 and 3.3: turns between `<|start_header_id|>role<|end_header_id|>` and `<|eot_id|>`, calls as bare JSON.

The wording is that of the checkpoints' own template, with which the models were trained. Where this differs from it: more than one call is
one object per line (the template refuses), a text beside calls stays, set off by `<|python_tag|>` (the template drops it), and arguments
that come as a string are not encoded twice. The built-in tools of Llama (code interpreter, search) are not offered.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.families.calls import in_call_order, object_call, objects, split_system
from palestra.server.renderer.text import arguments_text, call_of, json_text, strip_end, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import Message, ParsedReply, RenderOptions, ToolSpec
from palestra.server.types import RenderError

DEFAULT_DATE = "26 Jul 2024"
"""What the template prints where it is given no date."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_FORM = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
_IN_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
)
_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\n"
)
_CALL = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\\]{1,64}"\s*,\s*"(?:parameters|arguments)"\s*:'
)


class LlamaRenderer(FamilyRenderer):
    """Llama-3.1, 3.2, 3.3. `tools_in_user`: tools stand in the first user's turn, as the template does by default, else in the system's."""

    family: ClassVar[str] = "llama3"

    def __init__(self, codec: TokenCodec, tools_in_user: bool = True) -> None:
        super().__init__(codec)
        self.tools_in_user = tools_in_user
        self.begin, self.end = codec.special_id("<|begin_of_text|>"), codec.special_id("<|eot_id|>")
        self.start = codec.special_id("<|start_header_id|>")
        self.header_end = codec.special_id("<|end_header_id|>")
        self.python_tag = codec.special_id("<|python_tag|>")
        self.stop_ids = (self.end, codec.special_id("<|eom_id|>"), codec.special_id("<|end_of_text|>"))

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        return self._opening(system, tools, options, listed=bool(tools))

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions
    ) -> list[Piece]:
        system, rest = split_system(messages)
        if not (tools and self.tools_in_user and rest and rest[0]["role"] == "user"):
            return [*self.opening(system, tools, options), *self._turns(rest, (), options)]
        first = self._turn("user", _IN_USER + _FORM + _listed(tools) + text_of(rest[0]).strip())
        return [*self._opening(system, tools, options, listed=False), *first, *self._turns(rest[1:], (), options)]

    def _opening(
        self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions, listed: bool
    ) -> list[Piece]:
        text = "Environment: ipython\n" if tools else ""
        text += f"Cutting Knowledge Date: December 2023\nToday Date: {_day(options.date)}\n\n"
        if listed:
            text += _IN_SYSTEM + _FORM + _listed(tools)
        return [self.begin, *self._turn("system", text + (system or "").strip())]

    def _turn(self, role: str, text: str) -> list[Piece]:
        return [self.start, role, self.header_end, f"\n\n{text}", self.end]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        return self._turn(role, text.strip())

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        ordered = in_call_order(results, calls)
        return [piece for message, _ in ordered for piece in self._turn("ipython", json_text(text_of(message)))]

    def header(self) -> list[Piece]:
        return [self.start, "assistant", self.header_end, "\n\n"]

    def assistant_body(self, message: Message) -> list[Piece]:
        content = text_of(message)
        calls = message.get("tool_calls") or ()
        if not calls:
            return [BREAK, content]
        lines = [f'{{"name": {json_text(c["function"]["name"])}, "parameters": {arguments_text(c)}}}' for c in calls]
        said: list[Piece] = [content, self.python_tag] if content else []
        return [BREAK, *said, "\n".join(lines)]

    def call_opening(self, name: str) -> list[Piece]:
        return [f'{{"name": {json_text(name)}, "parameters": ' if name else '{"name": "']

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        at = rest.index(self.python_tag) if self.python_tag in rest else None
        text = self.codec.decode(rest if at is None else rest[at + 1 :])
        calls, wrong = _calls(text, sure=at is not None)
        if not calls:
            return ParsedReply({"role": "assistant", "content": self.codec.decode(rest)}, wrong)
        content = self.codec.decode(rest[:at]) if at else None
        return ParsedReply({"role": "assistant", "content": content, "tool_calls": calls}, wrong)


def _listed(tools: Sequence[ToolSpec]) -> str:
    return "".join(json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n" for tool in tools)


def _day(iso: str) -> str:
    """`2024-07-26` as `26 Jul 2024`, whatever the machine's language is."""
    if not iso:
        return DEFAULT_DATE
    try:
        day = datetime.date.fromisoformat(iso)
    except ValueError:
        raise RenderError(f"date {iso!r}: an ISO date such as 2024-07-26 is needed") from None
    return f"{day.day:02} {_MONTHS[day.month - 1]} {day.year}"


def _calls(text: str, sure: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The calls that a text consists of, and what is wrong with it. A text that holds anything else is none: an answer may be JSON, and
    only `sure` (after `<|python_tag|>`) makes a fault of that."""
    values, end = objects(text)
    calls = [call for value in values if (call := object_call(value)) is not None]
    if len(calls) < len(values):
        return [], "a call without a name or arguments" if sure or calls else None
    rest = text[end:]
    if not rest:
        return calls, None if calls or not sure else "nothing where a call should be"
    if not (sure or _CALL.match(rest)):
        broken = rest.startswith('{"name":') or bool(calls)
        return [], "a call that is no JSON" if broken else None
    call, wrong = call_of(rest)
    return ([*calls, call], wrong) if call is not None else ([], wrong)
