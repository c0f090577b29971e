"""Conversations for tests of chat families: a session as the gateway would hold it, and the cases that every family must bear."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.renderer.types import Message, RenderOptions, Snapshot

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [WEATHER, CLOCK]


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str | None, *calls: dict[str, Any], reasoning: str = "") -> dict[str, Any]:
    """An assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return {**message, "reasoning_content": reasoning} if reasoning else message


def result(content: str, call_id: str) -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@functools.cache
def _names(codec: TokenCodec) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(codec.special, key=len, reverse=True))))


def written(renderer: FamilyRenderer, text: str) -> list[int]:
    """Ids of a text whose special tokens are meant."""
    ids: list[int] = []
    at = 0
    for found in _names(renderer.codec).finditer(text):
        ids += [*renderer.codec.encode_text(text[at : found.start()]), renderer.codec.special[found[0]]]
        at = found.end()
    return ids + renderer.codec.encode_text(text[at:])


def sampled(renderer: FamilyRenderer, message: Message, opened: Sequence[int] = ()) -> list[int]:
    """The ids with which a model would say a message, its end included, where the prompt has opened its turn so."""
    ids = renderer.codec.encode([*renderer.assistant_body(message), *renderer.turn_end(message)])
    return ids[len(opened) :] if ids[: len(opened)] == list(opened) else ids


class Session:
    """Plays a conversation turn by turn: `ids` only ever grows, as the engine's view does."""

    def __init__(
        self,
        renderer: FamilyRenderer,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        options: RenderOptions | None = None,
    ) -> None:
        self.renderer, self.options = renderer, options
        first = renderer.render(messages, tools, options)
        self.ids, self.completion = list(first.ids), list[int]()
        self.opened = self.ids[len(self.ids) - first.opened :]
        self.closed: list[int] = []
        self.mask = [0] * len(self.ids)
        self.reply: Message = {}

    def say(self, completion: Sequence[int] | Message) -> Message:
        """The model answers, by ids or by a message; returns the message as it is read back."""
        ids = sampled(self.renderer, completion, self.opened) if isinstance(completion, dict) else completion
        self.completion = [token for token in ids if isinstance(token, int)]
        self.reply = self.renderer.parse(self.completion, self.opened).message
        self.ids += self.completion
        self.mask += [1] * len(self.completion)
        return self.reply

    def hear(self, *new: Message) -> str:
        """New messages come; returns the text that they add to the prompt."""
        last = Snapshot(self.completion, self.reply, self.opened)
        more = self.renderer.extend(last, new, self.options)
        self.ids += more.ids
        self.mask += [0] * len(more.ids)
        self.closed = list(more.ids[: more.close_tokens])
        self.opened = list(more.ids[len(more.ids) - more.opened :]) if more.opened else []
        return self.renderer.codec.decode(more.ids)

    @property
    def text(self) -> str:
        """All that the engine has seen and said."""
        return self.renderer.codec.decode(self.ids)


def without_ids(message: Message) -> dict[str, Any]:
    """A message whose calls have no ids, to compare across formats that do not carry them."""
    calls = [{**each, "id": ""} for each in message.get("tool_calls") or ()]
    return {**message, **({"tool_calls": calls} if calls else {})}
