"""MiniMax-M2: `]~b]role\\n ... [e~[\\n`, calls in XML's manner, reasoning that the prompt opens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.blocks import Found, Marks, XmlForm, read_reply, read_xml
from palestra.server.renderer.text import arguments_value, json_text, spelled, strip_end, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import ExtendRefused, Message, ParsedReply, RenderOptions, ToolSpec

MINIMAX_SYSTEM = "You are a helpful assistant."
"""The system turn that MiniMax-M2's own template puts in where a conversation has none, or an empty one."""
TOOLS_BEGIN = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
)
TOOLS_END = (
    "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
    '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
)
"""The wording around the tools' list that the models were trained with."""

CALL = XmlForm(
    call=re.compile(r'\s*<invoke name="([^"\n]{1,256})">'),
    call_end=re.compile(r"</invoke>\s*(?=<invoke name=|\Z)"),
    key=re.compile(r'\s*<parameter name="([^"\n]{1,256})">'),
    key_end=re.compile(r"</parameter>\s*(?=<parameter name=|\Z)"),
)


class MiniMaxRenderer(FamilyRenderer):
    """MiniMax-M2. A block of calls holds all of a reply's calls, so there is no id that ends a single one."""

    family: ClassVar[str] = "minimax"
    separator: Sequence[Piece] = ("\n",)

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.begin, self.role, self.end = (codec.special_id(text) for text in ("]~!b[", "]~b]", "[e~["))
        self.marks: Marks = (codec.special_id("<think>"), codec.special_id("</think>"))
        self.think, self.think_end = self.marks
        self.block: Marks = (codec.special_id("<minimax:tool_call>"), codec.special_id("</minimax:tool_call>"))
        self.stop_ids = (self.end,)

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        pieces: list[Piece] = [self.begin, self.role, f"system\n{system or MINIMAX_SYSTEM}"]
        if tools:
            listed = "".join(f"<tool>{json_text(tool['function'])}</tool>\n" for tool in tools)
            pieces += [TOOLS_BEGIN, listed, *self.codec.wording(TOOLS_END)]
        return [*pieces, self.end, "\n"]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        if role == "system":
            raise ExtendRefused("system_after_reply", "minimax: a system message can only be the first message")
        return [self.role, f"{role}\n{text}", self.end, "\n"]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        listed = "".join(f"\n<response>{text_of(message)}</response>" for message in results)
        return [self.role, f"tool{listed}", self.end, "\n"]

    def header(self) -> list[Piece]:
        return [self.role, "ai\n"]

    def opened(self, options: RenderOptions) -> list[Piece]:
        return self._think_block("") if options.thinking is False else [self.marks[0], "\n"]

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        return self._think_block("")

    def _think_block(self, reasoning: str) -> list[Piece]:
        return [self.marks[0], f"\n{reasoning}\n", self.marks[1], "\n\n"]

    def assistant_body(self, message: Message) -> list[Piece]:
        reasoning = (message.get("reasoning_content") or "").strip("\n")
        return [self.marks[0], "\n", BREAK, f"{reasoning}\n", self.marks[1], "\n\n", *self._said(message)]

    def past_turn(self, message: Message) -> list[Piece]:
        reasoning = (message.get("reasoning_content") or "").strip("\n")
        thought = self._think_block(reasoning) if reasoning else []
        return [*self.header(), BREAK, *thought, *self._said(message), *self.turn_end(message)]

    def _said(self, message: Message) -> list[Piece]:
        """Content and calls."""
        calls = message.get("tool_calls") or ()
        if not calls:
            return [text_of(message)]
        invokes = "".join(
            f'<invoke name="{call["function"]["name"]}">\n{_parameters(call)}</invoke>\n' for call in calls
        )
        return [f"{text_of(message)}\n", self.block[0], f"\n{invokes}", self.block[1]]

    def call_opening(self, name: str) -> list[Piece]:
        return ["\n", self.block[0], f'\n<invoke name="{name}">\n' if name else '\n<invoke name="']

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        return read_reply(self.codec, rest, self.marks, self.block, self.read_calls)

    def read_calls(self, ids: list[int], closed: bool) -> Found:
        """The calls of one block."""
        return read_xml(CALL, self.codec.decode(ids))


def _parameters(call: Message) -> str:
    arguments = arguments_value(call)
    if not isinstance(arguments, dict):
        return f"{spelled(arguments)}\n"
    return "".join(f'<parameter name="{key}">{spelled(value)}</parameter>\n' for key, value in arguments.items())
