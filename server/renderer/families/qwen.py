"""Qwen's families: ChatML with tools in the system turn, calls and results between tags, reasoning in a think block.

Formats: the chat templates that the models were published with. What stood in a conversation stays in it, think blocks included: the
templates drop earlier ones, which would change what the engine has seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.server.renderer.blocks import Found, Marks, XmlForm, read_reply, read_xml
from palestra.server.renderer.families.chatml import ChatMLRenderer
from palestra.server.renderer.text import (
    arguments_text,
    arguments_value,
    call_of,
    json_text,
    spelled,
    strip_end,
    text_of,
)
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import ExtendRefused, Message, ParsedReply, RenderOptions, ToolSpec

TOOLS_BEGIN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_END = (
    "\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
"""The wording around the tools' list that Qwen2.5 and Qwen3 were trained with."""
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
"""The system turn that Qwen2.5's own template puts in where a conversation has none."""


class Qwen25Renderer(ChatMLRenderer):
    """Qwen2.5: calls between special ids, results between tags that are text there; no reasoning."""

    family: ClassVar[str] = "qwen2.5"
    default_system: ClassVar[str | None] = QWEN_SYSTEM

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.block: Marks = (codec.special_id("<tool_call>"), codec.special_id("</tool_call>"))
        self.call, self.call_end = self.block
        self.response, self.response_end = codec.wording("<tool_response>"), codec.wording("</tool_response>")
        self.thinking: Marks | None = None

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        system = self.default_system if system is None else system
        if not tools:
            return [] if system is None else self.plain_turn("system", system)
        return [
            self.start,
            f"system\n{system}\n\n" if system else "system\n",
            *self.codec.wording(TOOLS_BEGIN),
            "".join("\n" + json_text(tool) for tool in tools),
            *self.codec.wording(TOOLS_END),
            self.end,
            "\n",
        ]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [self.start, "user"]
        for message in results:
            pieces += ["\n", *self.response, f"\n{self.content(message)}\n", *self.response_end]
        return [*pieces, self.end, "\n"]

    def content(self, message: Message) -> str:
        """A message's text as the family writes it."""
        return text_of(message)

    def assistant_body(self, message: Message) -> list[Piece]:
        return [BREAK, *self._said(message)]

    def _said(self, message: Message) -> list[Piece]:
        """Content and calls."""
        content = self.content(message)
        pieces: list[Piece] = [content]
        for number, call in enumerate(message.get("tool_calls") or ()):
            if number or content:
                pieces.append(self.before_call(number))
            pieces += [self.block[0], *self.call_body(call), self.block[1]]
        return pieces

    def before_call(self, number: int) -> str:
        """What stands between a call and what is before it."""
        return "\n"

    def call_body(self, call: Message) -> list[Piece]:
        """What a call block holds."""
        return [f'\n{{"name": {json_text(call["function"]["name"])}, "arguments": {arguments_text(call)}}}\n']

    def call_opening(self, name: str) -> list[Piece]:
        return [self.block[0], f'\n{{"name": {json_text(name)}, "arguments": ' if name else '\n{"name": "']

    def read_call(self, ids: list[int], closed: bool) -> Found:
        """The call of one block."""
        call, wrong = call_of(self.codec.decode(ids))
        return ([call] if call else []), wrong

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        return read_reply(self.codec, rest, self.thinking, self.block, self.read_call)


class Qwen3InstructRenderer(Qwen25Renderer):
    """Qwen3-Instruct-2507: Qwen3's tools, no default system turn, no reasoning."""

    family: ClassVar[str] = "qwen3-instruct"
    default_system: ClassVar[str | None] = None


class Qwen3Renderer(Qwen3InstructRenderer):
    """Qwen3, which reasons or not: without, the prompt holds an empty think block, and it stays there."""

    family: ClassVar[str] = "qwen3"
    opens_thinking: ClassVar[bool] = False
    """Whether the prompt opens the think block; then every reply has one, empty or not."""
    empty_past: ClassVar[bool] = False
    """Whether a past reply without reasoning is given an empty think block."""

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.marks: Marks = (codec.special_id("<think>"), codec.special_id("</think>"))
        self.thinking = self.marks
        self.think, self.think_end = self.marks

    def opened(self, options: RenderOptions) -> list[Piece]:
        if options.thinking is False:
            return self._think_block("")
        return [self.marks[0], "\n"] if self.opens_thinking else []

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        return self._think_block("") if opened else opened

    def _think_block(self, reasoning: str) -> list[Piece]:
        return [self.marks[0], f"\n{reasoning}\n", self.marks[1], "\n\n"]

    def assistant_body(self, message: Message) -> list[Piece]:
        reasoning = (message.get("reasoning_content") or "").strip("\n")
        if self.opens_thinking:
            begin, _, *rest = self._think_block(reasoning)
            return [begin, "\n", BREAK, f"{reasoning}\n", *rest, *self._said(message)]
        return [BREAK, *(self._think_block(reasoning) if reasoning else []), *self._said(message)]

    def past_turn(self, message: Message) -> list[Piece]:
        reasoning = (message.get("reasoning_content") or "").strip("\n")
        thought = self._think_block(reasoning) if reasoning or self.empty_past else []
        return [*self.header(), BREAK, *thought, *self._said(message), *self.turn_end(message)]


class Qwen3ThinkingRenderer(Qwen3Renderer):
    """Qwen3-Thinking-2507: the prompt opens the think block."""

    family: ClassVar[str] = "qwen3-thinking"
    opens_thinking: ClassVar[bool] = True


QWEN35_TOOLS_END = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
    "</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not tell "
    "the user about function calls\n</IMPORTANT>"
)
"""The wording that the models were trained with."""

QWEN35_CALL = XmlForm(
    call=re.compile(r"\s*<function=([^>\n]{1,256})>\n?"),
    call_end=re.compile(r"</function>\s*(?=<function=|\Z)"),
    key=re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?"),
    key_end=re.compile(r"\n?</parameter>\s*(?=<parameter=|\Z)"),
    words={"True": True, "False": False, "None": None},
)


class Qwen35Renderer(Qwen3Renderer):
    """Qwen3.5: calls in XML's manner, tools before the system text, texts without outer white space, one system turn at the beginning."""

    family: ClassVar[str] = "qwen3.5"
    opens_thinking: ClassVar[bool] = True
    empty_past: ClassVar[bool] = True

    def content(self, message: Message) -> str:
        return text_of(message).strip()

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        system = None if system is None else system.strip()
        if not tools:
            return [] if system is None else super().plain_turn("system", system)
        return [
            self.start,
            "system\n# Tools\n\nYou have access to the following functions:\n\n<tools>",
            "".join("\n" + json_text(tool) for tool in tools),
            *self.codec.wording(QWEN35_TOOLS_END),
            f"\n\n{system}" if system else "",
            self.end,
            "\n",
        ]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        if role == "system":
            raise ExtendRefused("system_after_reply", "qwen3.5: a system message can only be the first message")
        return super().plain_turn(role, text.strip())

    def before_call(self, number: int) -> str:
        return "\n" if number else "\n\n"

    def call_body(self, call: Message) -> list[Piece]:
        arguments = arguments_value(call)
        if isinstance(arguments, dict):
            inner = "".join(f"<parameter={k}>\n{_python(v)}\n</parameter>\n" for k, v in arguments.items())
        else:
            inner = f"{spelled(arguments)}\n"
        return [f"\n<function={call['function']['name']}>\n{inner}</function>\n"]

    def call_opening(self, name: str) -> list[Piece]:
        return [self.block[0], f"\n<function={name}>\n" if name else "\n<function="]

    def read_call(self, ids: list[int], closed: bool) -> Found:
        return read_xml(QWEN35_CALL, self.codec.decode(ids))


def _python(value: object) -> str:
    """A value as the family's template writes it: objects and arrays as JSON, all else as Python does."""
    return json_text(value) if isinstance(value, dict | list) else str(value)
