"""Mistral's tekken formats, v3 to v13: `[INST]...[/INST]reply</s>`, as mistral-common encodes them.

| version | system text | tools stand before | a call | a result |
| --- | --- | --- | --- | --- |
| v3 | in the last user's turn | the last user's turn | in a JSON list, with its id | JSON with the call's id |
| v7 | `[SYSTEM_PROMPT]` | the last user's turn | in a JSON list, with its id | `id[TOOL_CONTENT]text` |
| v11 | `[SYSTEM_PROMPT]` | the last user's turn | `name[CALL_ID]id[ARGS]{...}` | `id[TOOL_CONTENT]text` |
| v13 | `[SYSTEM_PROMPT]` | the first user's turn | `name[ARGS]{...}` | text |

"Last" is that of a whole prompt: an extension leaves tools and system text where the engine saw them. Ids have nine letters or digits;
others are mapped to such, the same way each time.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from palestra.server.renderer.base import PLAIN, FamilyRenderer
from palestra.server.renderer.blocks import CUT, NO_NAME, split_thinking
from palestra.server.renderer.families.calls import (
    called,
    gather_system,
    in_call_order,
    object_call,
    objects,
    split,
    split_system,
)
from palestra.server.renderer.text import arguments_text, arguments_value, call_of, json_text, strip_end, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import ExtendRefused, Message, ParsedReply, RenderOptions, ToolSpec
from palestra.server.types import RenderError

Version = Literal["v3", "v7", "v11", "v13"]
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
_LIST = re.compile(r"\s*\[?")


class MistralRenderer(FamilyRenderer):
    """Mistral models on tekken. `version` None: the newest that the tokenizer's tokens allow (older tokenizers name the tokens of later
    versions too, so where the version is known it should be given)."""

    family: ClassVar[str] = "mistral"

    def __init__(self, codec: TokenCodec, version: Version | None = None) -> None:
        super().__init__(codec)
        self.version: Version = version or _newest(codec)
        if self.version not in get_args(Version):
            raise RenderError(f"mistral version {version!r}; known: {', '.join(get_args(Version))}")
        self.begin, self.end = codec.special_id("<s>"), codec.special_id("</s>")
        self.inst, self.inst_end = codec.special_id("[INST]"), codec.special_id("[/INST]")
        self.tools, self.tools_end = codec.special_id("[AVAILABLE_TOOLS]"), codec.special_id("[/AVAILABLE_TOOLS]")
        self.results, self.results_end = codec.special_id("[TOOL_RESULTS]"), codec.special_id("[/TOOL_RESULTS]")
        self.calls = codec.special_id("[TOOL_CALLS]")
        self.stop_ids = (self.end,)
        if self.version != "v3":
            self.system, self.system_end = codec.special_id("[SYSTEM_PROMPT]"), codec.special_id("[/SYSTEM_PROMPT]")
            self.content = codec.special_id("[TOOL_CONTENT]")
        if self.version in ("v11", "v13"):
            self.args, self.call_id = codec.special_id("[ARGS]"), codec.special_id("[CALL_ID]")
        if self.version == "v13":
            self.think, self.think_end = codec.special.get("[THINK]"), codec.special.get("[/THINK]")

    # What the family says.

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        told: list[Piece] = [] if system is None else self.plain_turn("system", system)
        return [self.begin, *told, *self._listed(tools)]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        if role == "user":
            return [self.inst, text, self.inst_end]
        if self.version == "v3":
            raise ExtendRefused("system_after_reply", "mistral v3: a system text is part of the last user's turn")
        return [self.system, text, self.system_end]

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for message, call in in_call_order(results, calls):
            call_id = _short(message.get("tool_call_id") or (call or {}).get("id") or "")
            text = text_of(message)
            if self.version == "v3":
                said: list[Piece] = [json_text({"content": _value(text), "call_id": call_id})]
            elif self.version == "v13":
                said = [text]
            else:
                said = [call_id, self.content, text]
            pieces += [self.results, *said, self.results_end]
        return pieces

    def header(self) -> list[Piece]:
        return []

    def assistant_body(self, message: Message) -> list[Piece]:
        pieces: list[Piece] = [BREAK]
        reasoning = message.get("reasoning_content")
        if reasoning and self.think is not None and self.think_end is not None:
            pieces += [self.think, reasoning, self.think_end]
        pieces.append(text_of(message))
        calls = message.get("tool_calls") or ()
        if calls and self.version in ("v3", "v7"):
            listed = [{**_named(call), "arguments": arguments_value(call), "id": _id_of(call)} for call in calls]
            return [*pieces, self.calls, json_text(listed)]
        for call in calls:
            call_id: list[Piece] = [self.call_id, _id_of(call)] if self.version == "v11" else []
            pieces += [self.calls, call["function"]["name"], *call_id, self.args, arguments_text(call)]
        return pieces

    def call_opening(self, name: str) -> list[Piece]:
        if self.version in ("v11", "v13"):
            return [self.calls, name, self.args] if name else [self.calls]
        return [self.calls, f'[{{"name": {json_text(name)}, "arguments": ' if name else '[{"name": "']

    # The frame, where it is unlike the others'.

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions
    ) -> list[Piece]:
        system, rest = gather_system(messages) if self.version == "v3" else split_system(messages)
        rest = _merged(rest)
        users = [at for at, message in enumerate(rest) if message["role"] == "user"]
        if not users:
            return [*self.opening(system, tools, options), *self._turns(rest, (), options)]
        at = users[0] if self.version == "v13" else users[-1]
        if self.version == "v3" and system:
            rest[at] = {"role": "user", "content": f"{system}\n\n{text_of(rest[at])}"}
        first = self.opening(None if self.version == "v3" else system, (), options)
        before, after = self._turns(rest[:at], (), options), self._turns(rest[at:], (), options)
        return [*first, *before, *self._listed(tools), *after]

    def _turns(
        self, messages: Sequence[Message], calls: Sequence[Message], options: RenderOptions = PLAIN
    ) -> list[Piece]:
        return super()._turns(_merged(messages), calls, options)

    def _listed(self, tools: Sequence[ToolSpec]) -> list[Piece]:
        functions = [tool["function"] for tool in tools]
        listed = [
            {
                "type": "function",
                "function": {
                    "name": function["name"],
                    "description": function.get("description") or "",
                    "parameters": function.get("parameters") or {},
                },
            }
            for function in functions
        ]
        return [self.tools, json_text(listed), self.tools_end] if listed else []

    # Reading.

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        marks = None if self.think is None or self.think_end is None else (self.think, self.think_end)
        reasoning, rest = split_thinking([*opened, *strip_end(ids, self.stop_ids)], marks)
        text, calls, wrong = self._split_calls(rest)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if reasoning:
            message["reasoning_content"] = self.codec.decode(reasoning)
        if calls:
            message["tool_calls"] = calls
        return ParsedReply(message, wrong)

    def _split_calls(self, ids: Sequence[int]) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text outside the calls, the calls, and what was wrong. A block that names no tool stays text."""
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        wrong: str | None = None
        for mark, part in split(ids, (self.calls,)):
            if mark is None:
                text.append(self.codec.decode(part))
                continue
            found, fault = self._read_list(part) if self.version in ("v3", "v7") else self._read_call(part)
            wrong = wrong or fault
            calls += found
            if not found:
                text.append(self.codec.decode([mark, *part]))
        return "".join(text), calls, wrong

    def _read_list(self, ids: Sequence[int]) -> tuple[list[dict[str, Any]], str | None]:
        text = self.codec.decode(ids)
        begin = _LIST.match(text)
        values, end = objects(text, begin.end() if begin else 0)
        calls = [call for value in values if (call := object_call(value, _given(value))) is not None]
        wrong = "a call without a name or arguments" if len(calls) < len(values) else None
        rest = text[end:].strip()
        if rest.removeprefix("]").strip():
            call, wrong = call_of(rest)
            calls += [] if call is None else [{**call, "id": _fresh()}]
        return calls, wrong if calls or wrong else "nothing where a call should be"

    def _read_call(self, ids: Sequence[int]) -> tuple[list[dict[str, Any]], str | None]:
        parts = dict(reversed(split(ids, (self.args, self.call_id))))  # of a mark that comes twice, the first counts
        name = self.codec.decode(parts.get(None, [])).strip()
        if not name or self.args not in parts:
            return [], CUT if name else NO_NAME
        given = self.codec.decode(parts.get(self.call_id, []))
        call, wrong = called(name, self.codec.decode(parts[self.args]), given if _SHORT.fullmatch(given) else _fresh())
        return [call], wrong


def _newest(codec: TokenCodec) -> Version:
    if "[THINK]" in codec.special:
        return "v13"
    if "[ARGS]" in codec.special:
        return "v11"
    return "v7" if "[SYSTEM_PROMPT]" in codec.special else "v3"


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Users' turns that follow each other are one, as mistral-common has it."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {"role": "user", "content": f"{text_of(merged[-1])}\n\n{text_of(message)}"}
        else:
            merged.append(message)
    return merged


def _named(call: Message) -> dict[str, Any]:
    return {"name": call["function"]["name"]}


def _id_of(call: Message) -> str:
    return _short(call.get("id") or call["function"]["name"])


def _given(value: Any) -> str:
    """The id that the model wrote into a call, if it is a right one, else a fresh one."""
    given = value.get("id") if isinstance(value, dict) else None
    return given if isinstance(given, str) and _SHORT.fullmatch(given) else _fresh()


def _short(call_id: str) -> str:
    """An id of nine letters or digits: itself where it is one."""
    return call_id if _SHORT.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _fresh() -> str:
    return secrets.token_hex(5)[:9]


def _value(text: str) -> Any:
    """A result as v3 embeds it: JSON as the value that it spells, other text as a string, nothing as an empty object."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
