"""GLM-4.5 and GLM-4.6: turns that only have a beginning, which is what the model stops on; calls with marked keys and values.

The ids `<|user|>` and `<|observation|>` end a reply and begin the next turn: where the model sampled the one that follows, it is not put
twice; where it sampled the other, an empty turn of that role stays, since what was sampled is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.blocks import NO_NAME, Found, Marks, call_with, read_reply
from palestra.server.renderer.text import arguments_value, json_text, literal, spelled, strip_end, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import Message, ParsedReply, RenderOptions, Snapshot, ToolSpec

TOOLS_BEGIN = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_END = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
"""The wording around the tools' list that the models were trained with."""
NO_THINKING = "/nothink"
"""Ends a user's turn where the reply shall come without reasoning."""


class GlmRenderer(FamilyRenderer):
    """GLM-4.5 and GLM-4.6. Every reply has a think block, empty or not."""

    family: ClassVar[str] = "glm"

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.system, self.user = codec.special_id("<|system|>"), codec.special_id("<|user|>")
        self.assistant, self.observation = codec.special_id("<|assistant|>"), codec.special_id("<|observation|>")
        self.begin: list[Piece] = [codec.special_id("[gMASK]"), codec.special_id("<sop>")]
        self.marks: Marks = (codec.special_id("<think>"), codec.special_id("</think>"))
        self.think, self.think_end = self.marks
        self.block: Marks = (codec.special_id("<tool_call>"), codec.special_id("</tool_call>"))
        self.call_end = self.block[1]
        self.key: Marks = (codec.special_id("<arg_key>"), codec.special_id("</arg_key>"))
        self.value: Marks = (codec.special_id("<arg_value>"), codec.special_id("</arg_value>"))
        self.response, self.response_end = codec.wording("<tool_response>"), codec.wording("</tool_response>")
        endoftext = codec.special.get("<|endoftext|>")
        self.stop_ids = (self.user, self.observation, *([] if endoftext is None else [endoftext]))
        self.end = self.user

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        pieces = [*self.begin]
        if tools:
            listed = "".join(json_text(tool) + "\n" for tool in tools)
            pieces += [self.system, TOOLS_BEGIN, listed, *self.codec.wording(TOOLS_END)]
        return pieces if system is None else [*pieces, *self.plain_turn("system", system)]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        return [self.system if role == "system" else self.user, f"\n{text}"]

    def user_turn(self, text: str, options: RenderOptions) -> list[Piece]:
        quiet = options.thinking is False and not text.endswith(NO_THINKING)
        return [*self.plain_turn("user", text), *(self.codec.wording(NO_THINKING) if quiet else [])]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [self.observation]
        for message in results:
            pieces += ["\n", *self.response, f"\n{text_of(message)}\n", *self.response_end]
        return pieces

    def header(self) -> list[Piece]:
        return [self.assistant]

    def opened(self, options: RenderOptions) -> list[Piece]:
        return self._think_block("") if options.thinking is False else []

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        return [*self._think_block(""), "\n"]

    def _think_block(self, reasoning: str) -> list[Piece]:
        return ["\n", self.marks[0], reasoning, self.marks[1]]

    def assistant_body(self, message: Message) -> list[Piece]:
        content = text_of(message).strip()
        pieces = [*self._think_block((message.get("reasoning_content") or "").strip())]
        pieces += [f"\n{content}"] if content else []
        for call in message.get("tool_calls") or ():
            pieces += ["\n", self.block[0], f"{call['function']['name']}\n", *self._arguments(call), self.block[1]]
        return pieces

    def _arguments(self, call: Message) -> list[Piece]:
        arguments = arguments_value(call)
        if not isinstance(arguments, dict):
            return [f"{spelled(arguments)}\n"]
        pieces: list[Piece] = []
        for key, value in arguments.items():
            pieces += [self.key[0], key, self.key[1], "\n", self.value[0], spelled(value), self.value[1], "\n"]
        return pieces

    def turn_end(self, message: Message) -> list[Piece]:
        return [self.observation if message.get("tool_calls") else self.user]

    def past_turn(self, message: Message) -> list[Piece]:
        return [*self.header(), BREAK, *self.assistant_body(message)]

    def close(self, last: Snapshot) -> list[Piece]:
        return [piece for piece in super().close(last) if piece == self.marks[1]]

    def call_opening(self, name: str) -> list[Piece]:
        return [self.block[0], f"{name}\n"] if name else [self.block[0]]

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        return read_reply(self.codec, rest, self.marks, self.block, self.read_call)

    def read_call(self, ids: list[int], closed: bool) -> Found:
        """The call of one block: its name, then keys and values in turn."""
        first = ids.index(self.key[0]) if self.key[0] in ids else len(ids)
        name, _, other = self.codec.decode(ids[:first]).strip().partition("\n")
        if not name:
            return [], NO_NAME
        arguments = self._read_arguments(ids[first:]) if closed and not other else None
        call, wrong = call_with(name, arguments, other + self.codec.decode(ids[first:]))
        return [call], wrong

    def _read_arguments(self, ids: list[int]) -> dict[str, Any] | None:
        """The arguments; None where they are cut or something else stands among them."""
        arguments: dict[str, Any] = {}
        at = 0
        while at < len(ids):
            marks = (*self.key, *self.value)
            places: list[int] = []
            for mark in marks:
                try:
                    places.append(ids.index(mark, places[-1] + 1 if places else at))
                except ValueError:
                    return None if self.codec.decode(ids[at:]).strip() else arguments
            key, key_end, value, value_end = places
            if self.codec.decode(ids[at:key]).strip() or self.codec.decode(ids[key_end + 1 : value]).strip():
                return None
            text = self.codec.decode(ids[value + 1 : value_end])
            arguments[self.codec.decode(ids[key + 1 : key_end]).strip()] = literal(text)
            at = value_end + 1
        return arguments
