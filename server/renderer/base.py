"""The Renderer: messages to prompt ids, prefix-exact extension, and completion ids to a message.

In: OpenAI chat messages and tools. Out: token ids. `extend` never re-renders what the engine has seen: it gives only the ids that come
after the stored prompt and completion. Nothing here waits.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.types import RenderedRow, RenderError

Message = Mapping[str, Any]
ToolSpec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Extension:
    """The ids between a stored completion and the next one."""

    ids: tuple[int, ...]
    close_tokens: int
    """Leading ids that close a turn which its length limit cut: they are never trained."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A completion as an assistant message."""

    message: dict[str, Any]
    """role, content, tool_calls, reasoning_content: only the keys that apply."""
    has_calls: bool


class Renderer(ABC):
    """ChatML and its relatives: turns are `<|im_start|>role\\n ... <|im_end|>\\n`."""

    family = ""

    def __init__(self, codec: TokenCodec) -> None:
        self.codec = codec
        self.start, self.end = codec.special_id("<|im_start|>"), codec.special_id("<|im_end|>")
        endoftext = codec.special.get("<|endoftext|>")
        self.stop_ids: tuple[int, ...] = (self.end,) if endoftext is None else (self.end, endoftext)
        """Ids on which the model ends its turn."""

    @abstractmethod
    def system_pieces(self, system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
        """The opening turn, tools included; may be empty."""

    @abstractmethod
    def tool_result_pieces(self, results: Sequence[Message]) -> list[Piece]:
        """Consecutive tool messages, rendered together."""

    @abstractmethod
    def assistant_body(self, message: Message) -> list[Piece]:
        """What an assistant turn holds between its header and its end."""

    @abstractmethod
    def parse(self, ids: Sequence[int]) -> ParsedReply:
        """A completion as a message. The end token may be there or not; special tokens are matched by id."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The whole prompt, generation prompt included.

        Raises:
            RenderError: the messages cannot be expressed (unknown role, content that is not text).
        """
        return self.codec.encode([*self._conversation(messages, tools), *self._generation_prompt()])

    def extend(self, new: Sequence[Message], last_id: int | None) -> Extension:
        """The ids that follow a completion ending in `last_id`, up to the next generation prompt.

        Raises:
            RenderError: as for `render`; system and assistant messages cannot follow a reply without a fork.
        """
        if bad := next((m["role"] for m in new if m["role"] not in ("user", "tool")), None):
            raise RenderError(f"a {bad} message cannot extend a conversation")
        close: list[int] = [] if last_id == self.end else [self.end]
        pieces: list[Piece] = [*close, "\n", *self._turns(new), *self._generation_prompt()]
        return Extension(tuple(self.codec.encode(pieces)), len(close))

    def transcript(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedRow:
        """A finished conversation for supervised training: mask 1 on what the assistant turns hold, their end tokens included."""
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = [*self._conversation(messages[done:at], tools, opening=done == 0), *self._generation_prompt()]
            prompt = self.codec.encode(["\n", *before] if done else before)
            body = [*self.codec.encode(self.assistant_body(message)), self.end]
            ids += prompt + body
            mask += [0] * len(prompt) + [1] * len(body)
            done = at + 1
        if not done:
            raise RenderError("a transcript needs at least one assistant message")
        return RenderedRow(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))

    def _generation_prompt(self) -> list[Piece]:
        return [self.start, "assistant\n"]

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], opening: bool = True
    ) -> list[Piece]:
        if not opening:
            return self._turns(messages)
        system, rest = None, list(messages)
        if rest and rest[0]["role"] in ("system", "developer"):
            system, rest = text_of(rest[0]), rest[1:]
        return [*self.system_pieces(system, tools), *self._turns(rest)]

    def _turns(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            role = message["role"]
            if role == "tool":
                end = at
                while end < len(messages) and messages[end]["role"] == "tool":
                    end += 1
                pieces += self.tool_result_pieces(messages[at:end])
                at = end
                continue
            if role == "assistant":
                pieces += [self.start, "assistant\n", BREAK, *self.assistant_body(message), self.end, "\n"]
            elif role in ("user", "system"):
                pieces += [self.start, f"{role}\n{text_of(message)}", self.end, "\n"]
            else:
                raise RenderError(f"message {at} has role {role!r}; known: system, user, assistant, tool")
            at += 1
        return pieces


def text_of(message: Message) -> str:
    """A message's content as text; None is the empty string, text parts are joined.

    Raises:
        RenderError: a part that is not text.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RenderError(f"content part of type {kind!r}: only text can be rendered")
            parts.append(str(part.get("text", "")))
        return "".join(parts)
    raise RenderError(f"content must be text, got {type(content).__name__}")


def arguments_text(call: Message) -> str:
    """A call's arguments as the JSON text to render: an object is spelled out, text that parses is normalised, other text stays."""
    arguments = call["function"].get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return str(arguments)
    return json.dumps(arguments, ensure_ascii=False)


def make_call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's form under a fresh id."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def strip_end(ids: Sequence[int], stop_ids: Sequence[int]) -> Sequence[int]:
    """The ids without the end token, if there is one."""
    return ids[:-1] if ids and ids[-1] in stop_ids else ids
