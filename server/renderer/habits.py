"""What a chat template wants its messages to look like, and what its turns look like: found by giving it a few short conversations.

In: a template, the tokenizer's special tokens, OpenAI messages. Out: `Habits`, and messages in the form that the template wants, their
texts hidden. Nothing here waits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.server.renderer.jinja import ChatTemplate
from palestra.server.renderer.text import arguments_value, text_of
from palestra.server.renderer.types import Message, RenderOptions, ToolSpec
from palestra.server.renderer.veil import SpecialText, Veil, shared_beginning
from palestra.server.types import RenderError

THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Special tokens around reasoning, where a tokenizer has them."""
PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
"""Stands for the tools where only it matters that there are some."""
_LONG_ID = "call_0123456789abcdef01234567"
_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Habits:
    """How a template takes messages and writes turns."""

    parts: bool = False
    """Content is given as a list of text parts, not as text."""
    arguments: str = "none"
    """A call's arguments are given as an `object`, as `text`, or as `either`; `none`: it shows no calls."""
    nine: bool = False
    """Call ids must be nine letters or digits."""
    end: str | None = None
    """The special token that ends an assistant's turn; None where the next turn's header does."""
    ends: frozenset[str] = frozenset()
    """What an assistant's turn can end on, as the template writes it."""
    think: tuple[str, str] | None = None
    """The special tokens around reasoning."""


def learn(template: ChatTemplate, special: SpecialText, stops: Sequence[str]) -> Habits:
    """The habits of a template. `stops`: the special tokens on which the checkpoint's generation stops.

    Raises:
        RenderError: it cannot render even a question and an answer.
    """
    think = next((pair for pair in THINK if all(token in special for token in pair)), None)
    parts = not _shows_text(template)
    plain = Habits(parts=parts)
    end, later = _ends_of_text(template, special, plain)
    ends = {token for token in (end, later) if token} | (set() if end else set(stops))
    habits = Habits(parts, end=end, ends=frozenset(ends), think=think)
    for nine in (False, True):
        found = Habits(parts, _arguments(template, parts, nine), nine, end, habits.ends, think)
        if found.arguments != "none":
            last = _end_of_call(template, special, found)
            known = last is not None and (last in stops or last in ends)
            return Habits(parts, found.arguments, nine, end, habits.ends | ({last} if known and last else set()), think)
    return habits


def dress(messages: Sequence[Message], veil: Veil, habits: Habits) -> list[dict[str, Any]]:
    """Messages as the template wants them, their texts hidden in `veil`.

    Raises:
        RenderError: an unknown role, content that is not text, or calls for a template that shows none.
    """
    return [_dressed(at, message, veil, habits) for at, message in enumerate(messages)]


def check_shown(text: str, messages: Sequence[Message], first: int, veil: Veil, habits: Habits) -> None:
    """That a rendering shows every message but the assistant's, whose texts are hidden in `veil` from number `first` on.

    Raises:
        RenderError: the template leaves a message out.
    """
    shown = veil.seen(text)
    for at, message in enumerate(messages):
        again = Veil(veil.special)
        dress([message], again, habits)
        numbers = range(first, first + len(again.texts))
        first = numbers.stop
        if message["role"] != "assistant" and numbers and not shown.intersection(numbers):
            raise RenderError(f"the chat template leaves out message {at} ({message['role']})")


def veiled_tools(tools: Sequence[ToolSpec], veil: Veil, special: SpecialText) -> list[Any]:
    """Tools with those texts hidden that spell a special token or a veil's word; templates look into the others."""

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return veil.hide(value) if value in special or "zqVeil" in value else value
        if isinstance(value, Mapping):
            return {hidden(str(key)): hidden(entry) for key, entry in value.items()}
        return [hidden(entry) for entry in value] if isinstance(value, list | tuple) else value

    return [hidden(tool) for tool in tools]


def generation(template: ChatTemplate, special: SpecialText, habits: Habits, options: RenderOptions) -> tuple[str, str]:
    """The generation prompt: the header of an assistant's turn, and what the template opens of the turn itself (an open or empty think
    block). Both "" where it cannot be told."""
    veil = Veil()
    asked = dress([{"role": "user", "content": "x"}], veil, habits)
    full = template.text(asked, (), options)
    bare = template.text(asked, (), options, generate=False)
    at = special.before(full, len(shared_beginning(full, bare)))
    if at < (veil.end_of_last(full, range(1)) or 0):
        return "", ""
    prompt = full[at:]
    starts = [prompt.index(token) for token in habits.think or () if token in prompt]
    cut = min(starts, default=len(prompt))
    return prompt[:cut], prompt[cut:]


def call_message(name: str, arguments: Any, number: int = 0, content: str | None = None) -> dict[str, Any]:
    """A probe's call of one tool."""
    call = {
        "id": f"{_LONG_ID[:-1]}{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _dressed(at: int, message: Message, veil: Veil, habits: Habits) -> dict[str, Any]:
    role = message["role"]
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RenderError(f"message {at} has role {role!r}; known: system, user, assistant, tool")
    content = veil.hide_inner(text_of(message))
    out: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if habits.parts:
        out["content"] = [{"type": "text", "text": content}]
    if role == "assistant":
        if reasoning := message.get("reasoning_content"):
            out["reasoning_content"] = veil.hide_inner(reasoning)
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [_dressed_call(call, veil, habits) for call in calls]
    elif role == "tool":
        if call_id := message.get("tool_call_id"):
            out["tool_call_id"] = _call_id(call_id, veil, habits)
        if name := message.get("name"):
            out["name"] = veil.plain(name)
    return out


def _dressed_call(call: Message, veil: Veil, habits: Habits) -> dict[str, Any]:
    if habits.arguments == "none":
        raise RenderError("the chat template shows no tool calls")
    value = arguments_value(call)
    given: Any
    if not isinstance(value, dict) and habits.arguments != "object":
        given = veil.hide(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    else:
        # A template that takes only an object gets broken arguments as the one text of an object: the turn stays a call.
        given = veil.hide_in(value if isinstance(value, dict) else {"arguments": value})
        if habits.arguments == "text":
            given = json.dumps(given, ensure_ascii=False)
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": veil.plain(call["function"]["name"]), "arguments": given},
    }
    if call_id := call.get("id"):
        out["id"] = _call_id(call_id, veil, habits)
    return out


def _call_id(text: str, veil: Veil, habits: Habits) -> str:
    if habits.nine and not _NINE.fullmatch(text):
        return hashlib.sha256(text.encode()).hexdigest()[:9]
    return veil.plain(text)


def _shows_text(template: ChatTemplate) -> bool:
    """Whether content is given as text; if not, it must be parts.

    Raises:
        RenderError: neither form is shown.
    """
    fault: RenderError | None = None
    for parts in (False, True):
        veil = Veil()
        try:
            text = template.text(dress([{"role": "user", "content": "x"}], veil, Habits(parts=parts)))
        except RenderError as error:
            fault = fault or error
            continue
        if 0 in veil.seen(text):
            return not parts
    raise fault or RenderError("the chat template does not show what a user says")


def _ends_of_text(template: ChatTemplate, special: SpecialText, habits: Habits) -> tuple[str | None, str | None]:
    """The special token right after an answer that is the last message, and after one that a question follows."""
    turns: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    veil = Veil()
    text = template.text(dress(turns, veil, habits), generate=False)
    at = veil.end_of_last(text, range(1, 2))
    if at is None:
        raise RenderError("the chat template does not show what the assistant says")
    end = special.first(text, at)
    later = template.text(dress([*turns, turns[0]], Veil(), habits))
    at = Veil.end_of_last(later, range(1, 2))
    return end, None if at is None else special.first(later, at)


def _arguments(template: ChatTemplate, parts: bool, nine: bool) -> str:
    """In which form a call's arguments come out as JSON (or as a form of the template's own), written once."""
    shown = []
    for form in ("object", "text"):
        veil = Veil()
        asked = [{"role": "user", "content": "x"}, call_message("probe_tool", {"key": "v"})]
        turns = dress(asked, veil, Habits(parts, form, nine))
        try:
            text = template.text(turns, [PROBE_TOOL], generate=False)
        except RenderError:
            shown.append(False)
            continue
        forms = veil.forms(text, len(veil.texts) - 1)
        once = {"json", "ascii json", "plain"} if form == "object" else {"json", "ascii json"}
        shown.append(bool(forms) and once.issuperset(forms))
    return {(True, True): "either", (True, False): "object", (False, True): "text", (False, False): "none"}[
        shown[0], shown[1]
    ]


def _end_of_call(template: ChatTemplate, special: SpecialText, habits: Habits) -> str | None:
    """The last special token of a turn that calls a tool."""
    veil = Veil()
    turns = dress([{"role": "user", "content": "x"}, call_message("probe_tool", {"key": "v"})], veil, habits)
    text = template.text(turns, [PROBE_TOOL], generate=False)
    at = veil.end_of_last(text, range(1, len(veil.texts)))
    return None if at is None else special.last(text, at)
