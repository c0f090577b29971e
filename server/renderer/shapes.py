"""Whether what a chat template says after a reply depends on what was said before it: tried out once per shape of conversation.

In: a template and the shape of an extension (what the reply held, the roles that follow). Out: nothing, or a word for why the extension
cannot be promised. Texts play no part, since templates never see them. Nothing here waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.server.renderer.habits import PROBE_TOOL, THINK, Habits, call_message, check_shown, dress
from palestra.server.renderer.jinja import ChatTemplate
from palestra.server.renderer.text import text_of
from palestra.server.renderer.types import Message, RenderOptions
from palestra.server.renderer.veil import Veil, shared_beginning
from palestra.server.types import RenderError

USER: Message = {"role": "user", "content": "x"}
SYSTEM: Message = {"role": "system", "content": "s"}
ANSWER: Message = {"role": "assistant", "content": "a"}
RESULT: Message = {
    "role": "tool",
    "content": "r",
    "tool_call_id": call_message("probe_tool", {})["tool_calls"][0]["id"],
}
CALL: Message = call_message("probe_tool", {"key": "v"})
TAGS = tuple(tag for pair in THINK for tag in pair)
BEGINNINGS: tuple[tuple[Message, ...], ...] = (
    (USER,),
    (SYSTEM, USER),
    (USER, ANSWER, USER),
    (USER, CALL, RESULT),
    (SYSTEM, USER, CALL, RESULT, ANSWER, USER),
)
"""What may come before a reply; those that a template refuses prove nothing and are passed over."""


@dataclass(frozen=True, slots=True)
class Turned:
    """What a template can see of a message when its texts are hidden."""

    role: str
    said: bool
    """Whether there is any content."""
    calls: int = 0
    reasoned: bool = False
    named: bool = False
    """Whether a result names its tool."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What an extension depends on."""

    reply: Turned
    new: tuple[Turned, ...]
    tools: bool
    """Whether the conversation lists tools."""
    options: RenderOptions
    """Of them only what the template is given."""


def shape_of(reply: Message, new: Sequence[Message], tools: bool, options: RenderOptions) -> Shape:
    """The shape of an extension."""
    given = RenderOptions(date=options.date, thinking=options.thinking, effort=options.effort)
    return Shape(_turned(reply), tuple(map(_turned, new)), tools, given)


class ShapeProof:
    """Tries shapes out on a template and remembers the outcome."""

    def __init__(self, template: ChatTemplate, habits: Habits) -> None:
        self._template, self._habits = template, habits
        self.why_not = functools.lru_cache(maxsize=512)(self._why_not)
        """Of a shape: None where the extension is the same after every beginning, else a word and a sentence."""

    def after_reply(
        self,
        beginning: Sequence[Message],
        reply: Message,
        new: Sequence[Message],
        shape: Shape,
        veil: Veil,
        options: RenderOptions,
    ) -> tuple[str, int]:
        """A rendering of `beginning`, the reply's stand-in and the new messages, and where the stand-in's last text ends in it.

        Raises:
            RenderError: the template refuses them, or does not show the reply.
        """
        before = dress(beginning, veil, self._habits)
        first = len(veil.texts)
        before += dress([_stand_in(reply)], veil, self._habits)
        last = len(veil.texts)
        text = self._template.text(
            [*before, *dress(new, veil, self._habits)], [PROBE_TOOL] if shape.tools else [], options
        )
        at = veil.end_of_last(text, range(first, last))
        if at is None:
            raise RenderError("the chat template does not show the last reply")
        check_shown(text, new, last, veil, self._habits)
        return text, at

    def _why_not(self, shape: Shape) -> tuple[str, str] | None:
        reply, new = _probe(shape.reply, 0), [_probe(turn, at) for at, turn in enumerate(shape.new)]
        after: set[str] = set()
        fault: RenderError | None = None
        for beginning in BEGINNINGS:
            if CALL in beginning and not shape.tools:
                continue
            asked = Veil()
            try:
                head = self._template.text(
                    dress(beginning, asked, self._habits), [PROBE_TOOL] if shape.tools else [], shape.options
                )
            except RenderError as error:
                fault = fault or error
                continue
            try:
                text, at = self.after_reply(beginning, reply, new, shape, Veil(), shape.options)
            except RenderError as error:
                return "template_refuses", str(error)
            if not self._continues(head, text):
                return (
                    "history_rewritten",
                    "the chat template writes what came before differently once these messages follow",
                )
            after.add(Veil.anonymous(text[at:]))
        if not after:
            return "template_refuses", str(fault)
        if len(after) > 1:
            return "depends_on_history", "what the chat template writes for these messages depends on the turns before"
        return None

    def _continues(self, head: str, text: str) -> bool:
        """Whether a prompt is still there once the conversation went on; a think block that its generation prompt opened need not be."""
        cut = len(shared_beginning(head, text))
        for tag in TAGS:
            at = head.rfind(tag)
            if 0 <= at < cut < at + len(tag):
                cut = at
        rest = head[cut:]
        for tag in TAGS:
            rest = rest.replace(tag, "")
        return not rest.strip()


def _turned(message: Message) -> Turned:
    return Turned(
        "system" if message["role"] == "developer" else str(message["role"]),
        bool(text_of(message).strip()),
        len(message.get("tool_calls") or ()),
        bool(message.get("reasoning_content")),
        bool(message.get("name")),
    )


def _probe(turn: Turned, at: int) -> Message:
    """A message of that kind."""
    message: dict[str, Any] = {"role": turn.role, "content": "c" if turn.said else ""}
    if turn.reasoned:
        message["reasoning_content"] = "t"
    if turn.calls:
        message["tool_calls"] = [
            call_message("probe_tool", {"key": "v"}, i)["tool_calls"][0] for i in range(turn.calls)
        ]
    if turn.role == "tool":
        message["tool_call_id"] = call_message("probe_tool", {}, at)["tool_calls"][0]["id"]
        if turn.named:
            message["name"] = "probe_tool"
    return message


def _stand_in(reply: Message) -> Message:
    """The reply with the ids and names of its calls, and a text at its end to find it by."""
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": '{"key": "v"}'}}
        for call in reply.get("tool_calls") or ()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(reply).strip() or ("" if calls else "x")}
    return {**message, "tool_calls": calls} if calls else message
