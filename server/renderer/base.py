"""What most chat families share: turns with a header, a body and an end, put one after the other.

In: OpenAI chat messages and tools. Out: token ids. A family says how its parts look (as pieces: text, special ids, breaks); this class puts
them together for a whole prompt, for an extension, and for a transcript, so that the three cannot disagree. Nothing here waits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from palestra.server.renderer.text import text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import (
    Message,
    ParsedReply,
    Rendered,
    Renderer,
    RenderOptions,
    Snapshot,
    ToolSpec,
)
from palestra.server.types import RenderedRow, RenderError

PLAIN = RenderOptions()


class FamilyRenderer(Renderer):
    """A family whose prompt is `opening, turn, turn, ..., header`. Subclasses set `end`, `stop_ids`, and override the hooks."""

    end: int
    """The id that ends a turn, put in where a reply did not end by itself."""
    separator: Sequence[Piece] = ()
    """What stands between the end of a reply and the next turn; the model does not sample it."""
    think: int | None = None
    think_end: int | None = None
    """Ids around reasoning, where the family has them."""

    def __init__(self, codec: TokenCodec) -> None:
        self.codec = codec

    # What a family says.

    @abstractmethod
    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        """What stands before the first turn: begin of text, the system turn, the tools. `system` is None where there is no message."""

    @abstractmethod
    def plain_turn(self, role: str, text: str) -> list[Piece]:
        """A user's turn, or a system's in the middle of a conversation.

        Raises:
            ExtendRefused: the family has no such turn there.
        """

    def user_turn(self, text: str, options: RenderOptions) -> list[Piece]:
        """A user's turn, for families that say in it how the reply shall be."""
        return self.plain_turn("user", text)

    @abstractmethod
    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        """Consecutive tool messages, rendered together. `calls`: the tool_calls that they answer, as far as they are known."""

    @abstractmethod
    def header(self) -> list[Piece]:
        """The beginning of an assistant's turn."""

    @abstractmethod
    def assistant_body(self, message: Message) -> list[Piece]:
        """What an assistant's turn holds between its header and its end, as the model would sample it. It may begin with `opened`."""

    def past_turn(self, message: Message) -> list[Piece]:
        """An assistant's turn that stands in a prompt, from its header to its end, for families whose prompts differ there from what the
        model samples."""
        return [*self.header(), BREAK, *self.assistant_body(message), *self.turn_end(message)]

    def turn_end(self, message: Message) -> list[Piece]:
        """The end of an assistant's turn as the model would sample it."""
        return [self.end]

    def opened(self, options: RenderOptions) -> list[Piece]:
        """What of the assistant's turn stands in the prompt. A forced call and a prefill follow it, behind `past_thinking`."""
        return []

    def past_thinking(self, opened: list[Piece]) -> list[Piece]:
        """`opened` with its reasoning ended: a call and an answer do not begin inside it."""
        return [*opened, self.think_end] if self.think_end is not None and self._is_open(opened) else opened

    def call_opening(self, name: str) -> list[Piece]:
        """The beginning of a call of `name`, or of any tool where it is "".

        Raises:
            RenderError: the family cannot force a call.
        """
        raise RenderError(f"{self.family}: a tool call cannot be forced; leave tool_choice to the model")

    @abstractmethod
    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply: ...

    # What follows from it.

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: RenderOptions | None = None
    ) -> Rendered:
        options = options or PLAIN
        return self._prompt(self._conversation(messages, tools, options), options)

    def extend(self, last: Snapshot, new: Sequence[Message], options: RenderOptions | None = None) -> Rendered:
        options = options or PLAIN
        close = self.close(last)
        turns = self._turns(new, last.reply.get("tool_calls") or (), options)
        if not close:
            turns = _after(last.completion, turns)
        done = self._prompt([*close, *self.separator, *turns], options)
        return Rendered(done.ids, len(self.codec.encode(close)), done.opened)

    def close(self, last: Snapshot) -> list[Piece]:
        """What ends a reply that did not end by itself; nothing where it did."""
        if last.completion and last.completion[-1] in self.stop_ids:
            return []
        return [self.think_end, self.end] if self.think_end is not None and self.is_thinking(last) else [self.end]

    def is_thinking(self, last: Snapshot) -> bool:
        """Whether the reply was cut inside its reasoning."""
        return self._is_open([*last.opened, *last.completion])

    def _is_open(self, pieces: Sequence[Piece]) -> bool:
        """Whether the last think block among these begins and does not end."""
        marks = (self.think, self.think_end)
        return self.think is not None and next((p for p in reversed(pieces) if p in marks), None) == self.think

    def transcript(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedRow:
        ids: list[int] = []
        mask: list[int] = []
        done = 0
        calls: Sequence[Message] = ()
        opened = self.codec.encode(self.opened(PLAIN))
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if done:
                before = [*self.separator, *_after(ids, self._turns(messages[done:at], calls, PLAIN))]
            else:
                before = self._conversation(messages[:at], tools, PLAIN)
            prompt = self.codec.encode([*before, *self.header()])
            body = self.codec.encode([*self.assistant_body(message), *self.turn_end(message)])
            sampled = len(body) - (len(opened) if body[: len(opened)] == opened else 0)
            ids += prompt + body
            mask += [0] * (len(prompt) + len(body) - sampled) + [1] * sampled
            done, calls = at + 1, message.get("tool_calls") or ()
        if not done:
            raise RenderError("a transcript needs at least one assistant message")
        return RenderedRow(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.uint8))

    def _prompt(self, before: Sequence[Piece], options: RenderOptions) -> Rendered:
        opened = self.codec.encode(self._opened(options))
        return Rendered([*self.codec.encode([*before, *self.header()]), *opened], 0, len(opened))

    def _opened(self, options: RenderOptions) -> list[Piece]:
        opened = self.opened(options)
        if options.call is None and not options.prefill:
            return opened
        call = [] if options.call is None else self.call_opening(options.call)
        return [*self.past_thinking(opened), *call, *([options.prefill] if options.prefill else [])]

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: RenderOptions
    ) -> list[Piece]:
        system, rest = None, list(messages)
        if rest and rest[0]["role"] in ("system", "developer"):
            system, rest = text_of(rest[0]), rest[1:]
        return [*self.opening(system, tools, options), *self._turns(rest, (), options)]

    def _turns(
        self, messages: Sequence[Message], calls: Sequence[Message], options: RenderOptions = PLAIN
    ) -> list[Piece]:
        """`calls`: of the assistant's turn before, if there is one."""
        pieces: list[Piece] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            role = message["role"]
            if role == "tool":
                end = at
                while end < len(messages) and messages[end]["role"] == "tool":
                    end += 1
                pieces += self.tool_results(messages[at:end], calls)
                at = end
                continue
            if role == "assistant":
                calls = message.get("tool_calls") or ()
                pieces += [*self.past_turn(message), *self.separator]
            elif role == "user":
                pieces += self.user_turn(text_of(message), options)
            elif role in ("system", "developer"):
                pieces += self.plain_turn("system", text_of(message))
            else:
                raise RenderError(f"message {at} has role {role!r}; known: system, user, assistant, tool")
            at += 1
        return pieces


def _after(ids: Sequence[int], turns: list[Piece]) -> list[Piece]:
    """The turns that follow these ids; where the model ended its turn with the token that opens the next one, that token is not put
    twice."""
    return turns[1:] if ids and turns and turns[0] == ids[-1] else turns
