"""Kimi-K2: `<|im_ROLE|>name<|im_middle|> ... <|im_end|>`, calls in one section, each under the id that the model gave it.

An id is `functions.NAME:INDEX`. It is the call's id for the agent too, since the turn of its result names it. Kimi-K2-Thinking, known by
its think ids, writes a think block in every reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.blocks import CUT, NO_NAME, Found, Marks, read_reply
from palestra.server.renderer.text import make_call, spelled, strip_end, text_of
from palestra.server.renderer.tokens import Piece, TokenCodec
from palestra.server.renderer.types import Message, ParsedReply, RenderOptions, Snapshot, ToolSpec

KIMI_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
"""The system turn that the models' own templates put in where a conversation has none."""
CALL_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiRenderer(FamilyRenderer):
    """Kimi-K2-Instruct and Kimi-K2-Thinking."""

    family: ClassVar[str] = "kimi"

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.system, self.user, self.assistant, self.middle, self.end = (
            codec.special_id(f"<|im_{name}|>") for name in ("system", "user", "assistant", "middle", "end")
        )
        self.section: Marks = (
            codec.special_id("<|tool_calls_section_begin|>"),
            codec.special_id("<|tool_calls_section_end|>"),
        )
        self.call: Marks = (codec.special_id("<|tool_call_begin|>"), codec.special_id("<|tool_call_end|>"))
        self.argument = codec.special_id("<|tool_call_argument_begin|>")
        self.call_end = self.call[1]
        self.thinking: Marks | None = None
        if {"<think>", "</think>"} <= codec.special.keys():
            self.thinking = (codec.special_id("<think>"), codec.special_id("</think>"))
            self.think, self.think_end = self.thinking
        end_of_text = codec.special.get("[EOS]")
        self.stop_ids = (self.end,) if end_of_text is None else (self.end, end_of_text)

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        pieces: list[Piece] = []
        if tools:
            listed = json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            pieces += self._turn(self.system, "tool_declare", listed)
        if system is not None:
            return [*pieces, *self.plain_turn("system", system)]
        # The templates of the models that do not reason leave a line break behind the system turn that they put in.
        return [*pieces, *self.plain_turn("system", KIMI_SYSTEM), *([] if self.thinking else ["\n"])]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        return self._turn(self.user if role == "user" else self.system, role, text)

    def _turn(self, begin: int, name: str, text: str) -> list[Piece]:
        return [begin, name, self.middle, text, self.end]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for number, message in enumerate(results):
            call_id = _answered(message.get("tool_call_id"), calls, number)
            text = f"## Return of {call_id}\n{text_of(message)}"
            pieces += self._turn(self.system, message.get("name") or "tool", text)
        return pieces

    def header(self) -> list[Piece]:
        return [self.assistant, "assistant", self.middle]

    def opened(self, options: RenderOptions) -> list[Piece]:
        return self._think_block("") if options.thinking is False else []

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        return self._think_block("")

    def _think_block(self, reasoning: str) -> list[Piece]:
        return [self.thinking[0], reasoning, self.thinking[1]] if self.thinking else []

    def assistant_body(self, message: Message) -> list[Piece]:
        pieces = [*self._think_block(message.get("reasoning_content") or ""), text_of(message)]
        calls = message.get("tool_calls") or ()
        if not calls:
            return pieces
        pieces.append(self.section[0])
        for number, call in enumerate(calls):
            arguments = spelled(call["function"].get("arguments") or {})
            pieces += [self.call[0], _id_of(call, number), self.argument, arguments, self.call[1]]
        return [*pieces, self.section[1]]

    def call_opening(self, name: str) -> list[Piece]:
        # The index counts the calls of the whole conversation: the model writes it.
        return [self.section[0], self.call[0], f"functions.{name}:" if name else "functions."]

    def close(self, last: Snapshot) -> list[Piece]:
        close = super().close(last)
        if not close:
            return close
        seen = [*last.opened, *last.completion]
        ends: list[Piece] = [mark[1] for mark in (self.call, self.section) if _is_open(seen, mark)]
        return [*ends, *close]

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        rest = [*opened, *strip_end(ids, self.stop_ids)]
        return read_reply(self.codec, rest, self.thinking, self.section, self.read_section)

    def read_section(self, ids: list[int], closed: bool) -> Found:
        """The calls of one section."""
        calls: list[dict[str, Any]] = []
        wrong: str | None = None
        starts = [at for at, token in enumerate(ids) if token == self.call[0]]
        for start, after in zip(starts, [*starts[1:], len(ids)], strict=False):
            call, fault = self._read_call(ids[start + 1 : after])
            wrong = wrong or fault
            if call:
                calls.append(call)
        return calls, wrong if starts else NO_NAME

    def _read_call(self, ids: list[int]) -> tuple[dict[str, Any] | None, str | None]:
        end = ids.index(self.call[1]) if self.call[1] in ids else len(ids)
        middle = ids.index(self.argument) if self.argument in ids[:end] else end
        call_id = self.codec.decode(ids[:middle]).strip()
        found = CALL_ID.fullmatch(call_id)
        if found is None:
            return None, NO_NAME
        arguments = self.codec.decode(ids[middle + 1 : end])
        wrong = None if end < len(ids) and _is_object(arguments) else CUT
        return make_call(found[1], arguments if arguments.strip() else "{", call_id), wrong


def _id_of(call: Message, number: int) -> str:
    """The id that the model would have given. Those of other makers are replaced: the id is all that names the tool in a prompt."""
    name, given = call["function"]["name"], str(call.get("id") or "")
    return given if given.startswith(f"functions.{name}:") else f"functions.{name}:{number}"


def _answered(call_id: str | None, calls: Sequence[Message], number: int) -> str:
    """The id of the call that the result `number` answers, as the prompt shows it."""
    for at, call in enumerate(calls):
        if call.get("id") == call_id if call_id else at == number:
            return _id_of(call, at)
    return call_id or ""


def _is_open(ids: Sequence[int], mark: Marks) -> bool:
    """Whether the last of these blocks begins and does not end."""
    return next((token for token in reversed(ids) if token in mark), None) == mark[0]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
