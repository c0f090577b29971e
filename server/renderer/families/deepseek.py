"""DeepSeek-V3, R1 and V3.1: no separators, everything between special tokens; three variants of one frame.

Four things are unlike other families. A reply to tool results has no header: the model goes on right behind them. R1 opens `<think>` in the
prompt and V3.1 opens or closes it there, but neither template shows that again in history; here what an engine has seen stays. The block
that lists tools is the model card's for V3.1; V3 and R1 were published without one, so theirs is ours. And a system text exists only at the
beginning: a later one is gathered there in a whole prompt, and refused in an extension.
"""

# ruff: noqa: RUF001
# The bar in the tokens is U+FF5C, as the tokenizer spells them.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from palestra.server.renderer.base import PLAIN, FamilyRenderer
from palestra.server.renderer.blocks import CUT, NO_NAME, split_thinking
from palestra.server.renderer.families.calls import called, gather_system, in_call_order, split
from palestra.server.renderer.text import arguments_text, json_text, strip_end, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import (
    ExtendRefused,
    Message,
    ParsedReply,
    Rendered,
    RenderOptions,
    Snapshot,
    ToolSpec,
)
from palestra.server.types import RenderedRow, RenderError

Variant = Literal["v3", "r1", "v31"]
_MARKS = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "output▁begin", "output▁end")


class DeepSeekRenderer(FamilyRenderer):
    """DeepSeek-V3 (`v3`), R1 and its distilled models (`r1`), V3.1 (`v31`). A tokenizer without tool tokens serves without tools."""

    family: ClassVar[str] = "deepseek"

    def __init__(self, codec: TokenCodec, variant: Variant = "v3") -> None:
        if variant not in get_args(Variant):
            raise RenderError(f"deepseek variant {variant!r}; known: {', '.join(get_args(Variant))}")
        super().__init__(codec)
        self.variant = variant
        self.begin, self.end = codec.special_id("<｜begin▁of▁sentence｜>"), codec.special_id("<｜end▁of▁sentence｜>")
        self.user, self.assistant = codec.special_id("<｜User｜>"), codec.special_id("<｜Assistant｜>")
        self.stop_ids = (self.end,)
        if variant == "v3":
            self.think, self.think_end = codec.special.get("<think>"), codec.special.get("</think>")
        else:
            self.think, self.think_end = codec.special_id("<think>"), codec.special_id("</think>")
        names = [f"<｜tool▁{mark}｜>" for mark in (*_MARKS, "outputs▁begin", "outputs▁end")]
        self.has_tools = all(name in codec.special for name in names)
        ids = [codec.special[name] if self.has_tools else -1 for name in names]  # -1: no token is that
        self.calls, self.calls_end, self.call, self._call_end, self.sep = ids[:5]
        self.output, self.output_end, self.outputs, self.outputs_end = ids[5:]
        self.call_end = self._call_end if self.has_tools else None

    # What the family says.

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        if not tools:
            return [self.begin, system or ""]
        self._need_tools()
        listed = self._card_tools(tools) if self.variant == "v31" else self._plain_tools(tools)
        return [self.begin, f"{system}\n\n" if system else "", *listed]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        if role != "user":
            raise ExtendRefused("system_after_reply", "deepseek: a system message can only open a conversation")
        return [self.user, text]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        self._need_tools()
        pieces: list[Piece] = []
        for number, (message, _) in enumerate(in_call_order(results, calls)):
            if number and self.variant != "v31":
                pieces.append("\n")
            pieces += [self.output, text_of(message), self.output_end]
        return pieces if self.variant == "v31" else [self.outputs, *pieces, self.outputs_end]

    def header(self) -> list[Piece]:
        return [self.assistant]

    def assistant_body(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = []
        reasoning = message.get("reasoning_content")
        if reasoning and self.think is not None and self.think_end is not None:
            line, gap = ("\n", "\n\n") if self.variant == "r1" else ("", "")
            pieces += [self.think, line, reasoning, line, self.think_end, gap]
        pieces.append(text_of(message))
        calls = message.get("tool_calls") or ()
        if calls:
            self._need_tools()
            pieces.append(self.calls)
        for number, call in enumerate(calls):
            name, arguments = call["function"]["name"], arguments_text(call)
            if self.variant == "v31":
                pieces += [self.call, name, self.sep, arguments, self._call_end]
            else:
                pieces += ["\n" if number else "", self.call, "function", self.sep]
                pieces += [f"{name}\n```json\n{arguments}\n```", self._call_end]
        return [*pieces, self.calls_end] if calls else pieces

    def opened(self, options: RenderOptions) -> list[Piece]:
        if self.variant == "v3" or self.think is None or self.think_end is None:
            return []
        if self.variant == "v31":
            return [self.think if options.thinking else self.think_end]
        if options.thinking is False:
            return [self.think, "\n\n", self.think_end, "\n\n"]
        return [self.think, "\n"]

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        return self.opened(RenderOptions(thinking=False))

    def call_opening(self, name: str) -> list[Piece]:
        self._need_tools()
        if self.variant == "v31":
            return [self.calls, self.call, name, self.sep] if name else [self.calls, self.call]
        return [self.calls, self.call, "function", self.sep, f"{name}\n```json\n" if name else ""]

    def close(self, last: Snapshot) -> list[Piece]:
        """As in every family; a call and the block around it are closed as well."""
        close = super().close(last)
        if not close or not self.has_tools:
            return close
        open_call = open_block = False
        for token in (*last.opened, *last.completion):
            open_block = (open_block or token == self.calls) and token != self.calls_end
            open_call = (open_call or token == self.call) and token not in (self._call_end, self.calls_end)
        calls: list[Piece] = [self._call_end] if open_call else []
        return [*close[:-1], *calls, *([self.calls_end] if open_block else []), close[-1]]

    # The frame, where it is unlike the others'.

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions
    ) -> list[Piece]:
        system, rest = gather_system(messages)
        return [*self.opening(system, tools, options), *self._turns(rest, (), options)]

    def _turns(
        self, messages: Sequence[Message], calls: Sequence[Message], options: RenderOptions = PLAIN
    ) -> list[Piece]:
        pieces: list[Piece] = []
        others: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                others.append(message)
                continue
            pieces += super()._turns(others, calls, options)
            others, calls = [], message.get("tool_calls") or ()
            prompt, sampled = self._reply(pieces, message)
            pieces += [*prompt, BREAK, *sampled]
        return [*pieces, *super()._turns(others, calls, options)]

    def _prompt(self, before: Sequence[Piece], options: RenderOptions) -> Rendered:
        if not self._goes_on(before):
            return super()._prompt(before, options)
        call = [] if options.call is None else self.call_opening(options.call)
        opened = self.codec.encode([*call, options.prefill])
        return Rendered([*self.codec.encode(before), *opened], 0, len(opened))

    def transcript(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedRow:
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        calls: Sequence[Message] = ()
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            between = self._turns(messages[done:at], calls) if done else self._conversation(messages[:at], tools, PLAIN)
            start, sampled = self._reply(between, message)
            prompt, body = self.codec.encode([*between, *start]), self.codec.encode(sampled)
            ids += prompt + body
            mask += [0] * len(prompt) + [1] * len(body)
            done, calls = at + 1, message.get("tool_calls") or ()
        if not done:
            raise RenderError("a transcript needs at least one assistant message")
        return RenderedRow(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))

    def _goes_on(self, before: Sequence[Piece]) -> bool:
        """Whether tool results stand last: the reply follows them without a header, and with nothing opened."""
        return bool(before) and before[-1] in (self.output_end, self.outputs_end)

    def _reply(self, before: Sequence[Piece], message: Message) -> tuple[list[Piece], list[Piece]]:
        """A finished reply as a session would have had it: what stood in its prompt, and what was sampled."""
        sampled = [*self.assistant_body(message), *self.turn_end(message)]
        if self._goes_on(before):
            return [], sampled
        reasoned = bool(message.get("reasoning_content"))
        if not reasoned and self.variant != "v31":
            return self.header(), sampled
        opened = self.opened(RenderOptions(thinking=reasoned))
        return [*self.header(), *opened], sampled[len(opened) :] if reasoned else sampled

    # Reading.

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        marks = None if self.think is None or self.think_end is None else (self.think, self.think_end)
        reasoning, rest = split_thinking([*opened, *strip_end(ids, self.stop_ids)], marks)
        text, calls, wrong = self._split_calls(rest)
        line, gap = ("\n", "\n\n") if self.variant == "r1" and reasoning is not None else ("", "")
        content = text.removeprefix(gap)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        thought = self.codec.decode(reasoning or []).removeprefix(line).removesuffix(line)
        if thought.strip():
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return ParsedReply(message, wrong)

    def _split_calls(self, ids: Sequence[int]) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text outside the calls, the calls, and what was wrong. A block that names no tool stays text; white space between calls does
        not count."""
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        wrong: str | None = None
        for mark, part in split(ids, (self.calls, self.calls_end, self.call, self._call_end)):
            if mark is None or mark != self.call:
                said = self.codec.decode(part)
                text.append(said if mark is None or said.strip() else "")
                continue
            call, fault = self._read_call(part)
            wrong = wrong or fault
            if call is None:
                text.append(self.codec.decode([mark, *part]))
            else:
                calls.append(call)
        return "".join(text), calls, wrong

    def _read_call(self, ids: list[int]) -> tuple[dict[str, Any] | None, str | None]:
        if self.sep not in ids:
            return None, CUT
        at = ids.index(self.sep)
        first, second = self.codec.decode(ids[:at]), self.codec.decode(ids[at + 1 :])
        if self.variant == "v31":
            return called(first.strip(), second) if first.strip() else (None, NO_NAME)
        name, _, fenced = second.partition("\n")
        if not name.strip():
            return None, NO_NAME
        arguments = fenced.strip().removeprefix("```json").removesuffix("```")
        return called(name.strip(), arguments)

    # The block that lists tools.

    def _card_tools(self, tools: Sequence[ToolSpec]) -> list[Piece]:
        """V3.1's, word for word from its model card: the model was trained on it."""
        text = "## Tools\nYou have access to the following tools:\n\n"
        for tool in tools:
            function = tool["function"]
            about, parameters = function.get("description") or "", json_text(function.get("parameters") or {})
            text += f"### {function['name']}\nDescription: {about}\n\nParameters: {parameters}\n\n"
        return [
            f"{text}IMPORTANT: ALWAYS adhere to this exact format for tool use:\n",
            *(self.calls, self.call, "tool_call_name", self.sep, "tool_call_arguments", self._call_end),
            *("{additional_tool_calls}", self.calls_end),
            "\n\nWhere:\n- `tool_call_name` must be an exact match to one of the available tools\n"
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
            "- For multiple tool calls, chain them directly without separators or spaces",
        ]

    def _plain_tools(self, tools: Sequence[ToolSpec]) -> list[Piece]:
        """Of V3 and R1: our wording around the call form that they were trained on."""
        listed = "".join(json_text(tool["function"]) + "\n" for tool in tools)
        return [
            f"## Tools\n\nYou can call these functions:\n{listed}\nTo call one, write:\n",
            *(self.calls, self.call, "function", self.sep, "NAME\n```json\nARGUMENTS\n```", self._call_end),
            self.calls_end,
            "\nNAME is the function's name, ARGUMENTS one JSON object that fits its parameters. Several calls stand on lines "
            "of their own inside the same block. The results follow behind it.",
        ]

    def _need_tools(self) -> None:
        if not self.has_tools:
            raise RenderError(
                "deepseek: this tokenizer has no tokens for tools (a distilled model); leave the tools out"
            )
