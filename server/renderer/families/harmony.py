"""gpt-oss (harmony): `<|start|>role<|channel|>name<|message|>text<|end|>`; a reply is one or more such messages.

`analysis` is the reasoning, `final` the answer, `commentary` what is said beside calls, and a message `to=functions.NAME` a call; the model
ends its turn with `<|return|>` after an answer and with `<|call|>` after a call. The wording of the system and developer messages and the
type syntax of the tools are those that the models were trained on (github.com/openai/harmony, docs/format.md). What a sampled turn ended on
stays in the stored ids; a turn of history that no engine saw ends with `<|end|>`, as the format asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.blocks import CUT, NO_NAME
from palestra.server.renderer.families.calls import called, in_call_order, split
from palestra.server.renderer.families.typescript import functions_namespace
from palestra.server.renderer.text import arguments_text, text_of
from palestra.server.renderer.tokens import BREAK, Piece, TokenCodec
from palestra.server.renderer.types import Message, ParsedReply, RenderOptions, Snapshot, ToolSpec
from palestra.server.types import RenderError

EFFORTS = ("low", "medium", "high")
_NAMESPACE = "functions."


class HarmonyRenderer(FamilyRenderer):
    """gpt-oss. It cannot leave out its reasoning: `thinking` False asks for the lowest effort, where no effort is given."""

    family: ClassVar[str] = "harmony"

    def __init__(self, codec: TokenCodec) -> None:
        super().__init__(codec)
        self.start, self.channel = codec.special_id("<|start|>"), codec.special_id("<|channel|>")
        self.message, self.constrain = codec.special_id("<|message|>"), codec.special_id("<|constrain|>")
        self.end, self.returned = codec.special_id("<|end|>"), codec.special_id("<|return|>")
        self.call = codec.special_id("<|call|>")
        self.call_end = self.call
        endoftext = codec.special.get("<|endoftext|>")
        self.stop_ids = (self.returned, self.call, *(() if endoftext is None else (endoftext,)))
        self._ends = (self.end, *self.stop_ids)

    # What the family says.

    def opening(self, system: str | None, tools: Sequence[ToolSpec], options: RenderOptions) -> list[Piece]:
        text = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        text += f"Current date: {options.date}\n" if options.date else ""
        text += f"\nReasoning: {_effort(options)}\n\n"
        text += "# Valid channels: analysis, commentary, final. Channel must be included for every message."
        if tools:
            text += "\nCalls to these tools must go to the commentary channel: 'functions'."
        told = [f"# Instructions\n\n{system}"] if system else []
        told += [f"# Tools\n\n## functions\n\n{functions_namespace(tools)}"] if tools else []
        developer = self._message("developer", "\n\n".join(told)) if told else []
        return [*self._message("system", text), *developer]

    def _message(self, role: str, text: str) -> list[Piece]:
        return [self.start, role, self.message, text, self.end]

    def plain_turn(self, role: str, text: str) -> list[Piece]:
        return (
            self._message("user", text) if role == "user" else self._message("developer", f"# Instructions\n\n{text}")
        )

    def tool_results(self, results: Sequence[Message], calls: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for message, call in in_call_order(results, calls):
            name = message.get("name") if call is None else call["function"]["name"]
            if not name:
                raise RenderError("harmony: a tool message answers no call that is known, and has no name")
            pieces += [self.start, f"{_recipient(name)} to=assistant", self.channel, "commentary"]
            pieces += [self.message, text_of(message), self.end]
        return pieces

    def header(self) -> list[Piece]:
        return [self.start, "assistant"]

    def assistant_body(self, message: Message) -> list[Piece]:
        """Messages of one turn, without the header of the first and the end of the last."""
        content, calls = text_of(message), message.get("tool_calls") or ()
        parts: list[list[Piece]] = []
        if reasoning := message.get("reasoning_content"):
            parts.append(self._said("analysis", reasoning))
        if content or not calls:
            parts.append(self._said("commentary" if calls else "final", content))
        for call in calls:
            opening = self._call_header(call["function"]["name"])
            parts.append([*opening, self.constrain, "json", self.message, arguments_text(call), self.call])
        pieces: list[Piece] = [BREAK]
        for number, part in enumerate(parts):
            pieces += [*(self.header() if number else ()), *part]
        return pieces[:-1]

    def turn_end(self, message: Message) -> list[Piece]:
        return [self.call if message.get("tool_calls") else self.returned]

    def past_turn(self, message: Message) -> list[Piece]:
        turn = super().past_turn(message)
        return [*turn[:-1], self.end] if turn[-1] == self.returned else turn

    def opened(self, options: RenderOptions) -> list[Piece]:
        return [self.channel, "final", self.message] if options.prefill and options.call is None else []

    def call_opening(self, name: str) -> list[Piece]:
        opening = self._call_header(name)
        return (
            [*opening, self.constrain, "json", self.message] if name else [self.channel, f"commentary to={_NAMESPACE}"]
        )

    def close(self, last: Snapshot) -> list[Piece]:
        """Ends the message that was cut, which may still be in its header. A reply that was cut between two messages needs nothing."""
        marks = (self.start, self.message, *self._ends)
        seen = [token for token in (*last.opened, *last.completion) if token in marks]
        if not seen or seen[-1] == self.start:
            return [self.message, self.end]
        return [self.end] if seen[-1] == self.message else []

    def _said(self, channel: str, text: str) -> list[Piece]:
        return [self.channel, channel, self.message, text, self.end]

    def _call_header(self, name: str) -> list[Piece]:
        return [self.channel, f"commentary to={_recipient(name)} "]

    # Reading.

    def parse(self, ids: Sequence[int], opened: Sequence[int] = ()) -> ParsedReply:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        wrong: str | None = None
        for _, part in split([*opened, *ids], (self.start,)):
            header, body = self._cut(part)
            channel, recipient, complete = self._read_header(header)
            if recipient is not None:
                call, fault = self._read_call(recipient, complete, body)
                calls += [] if call is None else [call]
                wrong = wrong or fault
            elif body is not None:
                (reasoning if channel == "analysis" else content).append(self.codec.decode(body))
            elif channel is None and not "assistant".startswith(said := self.codec.decode(header)):
                content.append(said)  # no message of this format
        text = "\n\n".join(part for part in content if part)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if any(reasoning):
            message["reasoning_content"] = "\n\n".join(part for part in reasoning if part)
        if calls:
            message["tool_calls"] = calls
        return ParsedReply(message, wrong)

    def _cut(self, part: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """A message's header and its text (None where it was cut before), without the token that ends it."""
        (_, header), *rest = split(part, (self.message,))
        if not rest:
            return [token for token in header if token not in self._ends], None
        body = [token for mark, text in rest for token in (*(() if mark is None else (mark,)), *text)][1:]
        return header, body[:-1] if body and body[-1] in self._ends else body

    def _read_header(self, header: Sequence[int]) -> tuple[str | None, str | None, bool]:
        """Channel, recipient, and whether the recipient's name has ended. The recipient stands before or after the channel's name."""
        channel = recipient = None
        ended = False
        for mark, part in split(header, (self.channel, self.constrain)):
            text = self.codec.decode(part)
            words = text.split()
            if mark == self.channel and words and channel is None:
                channel = words[0]
            for word in words if mark != self.constrain else ():
                if word.startswith("to=") and recipient is None:
                    recipient, ended = word.removeprefix("to="), text[-1:].isspace() or word != words[-1]
            ended = ended or (recipient is not None and mark == self.constrain)
        return channel, recipient, ended

    def _read_call(
        self, recipient: str, complete: bool, body: Sequence[int] | None
    ) -> tuple[dict[str, Any] | None, str | None]:
        name = recipient.removeprefix(_NAMESPACE)
        if not name:
            return None, NO_NAME
        if body is None:
            return (called(name, "")[0], CUT) if complete else (None, CUT)
        return called(name, self.codec.decode(body))


def _recipient(name: str) -> str:
    """A name with a dot belongs to a namespace of its own (the built-in tools)."""
    return name if "." in name or not name else _NAMESPACE + name


def _effort(options: RenderOptions) -> str:
    effort = options.effort or ("low" if options.thinking is False else "medium")
    if effort not in EFFORTS:
        raise RenderError(f"harmony: effort {effort!r}; known: {', '.join(EFFORTS)}")
    return effort
