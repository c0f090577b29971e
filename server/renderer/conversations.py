"""Conversations that a renderer is tried on: one of each kind that breaks some template.

In: the special tokens of a tokenizer, so that messages can spell them. Out: conversations in OpenAI's form, which end on messages that
come after a reply. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.server.renderer.types import Message, RenderOptions, ToolSpec

TOOLS: tuple[ToolSpec, ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Says the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
DATE = "2026-01-31"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a kind."""

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    options: RenderOptions = field(default_factory=lambda: RenderOptions(date=DATE))
    cut: bool = False
    """Whether the replies are cut by their length limit."""


def corpus(special: Sequence[str]) -> tuple[Conversation, ...]:
    """A conversation of each kind; `special`: texts of special tokens, which some messages spell."""
    spelled = " ".join(special)
    paris, rome = call("get_weather", {"city": "Paris", "days": 2}, 0), call("get_weather", {"city": "Rome"}, 1)
    noon = call("get_time", {}, 0)
    thought = reply("Hello!", reasoning="They greet me.")
    off = RenderOptions(date=DATE, thinking=False)
    on = RenderOptions(date=DATE, thinking=True)
    plain = (user("Hi"), reply("Hello!"), user("Go on."))
    looped = (user("Compare."), reply(calls=[paris]), result("rain", paris), reply(calls=[rome]), result("sun", rome))
    odd = f"Zürich 北京 \U0001f30d\U0001f3fd e\u0301 \u2028 {spelled}"
    odd_call = call("get_weather", {"city": odd, "more": [odd, {"x": None, "y": 1.5}]}, 0)
    odd_name = call("get_weather", {odd: 1}, 0)
    huge = call("get_weather", {"city": "Ulm " * 1500, "days": list(range(300))}, 0)
    broken = call("get_weather", '{"city": "Par', 0)
    return (
        Conversation("question", plain),
        Conversation("system message", (system("Be brief."), *plain)),
        Conversation("many questions", (*plain, reply("Gladly."), user("More."), reply("Here."), user("And?"))),
        Conversation("one call", looped[:3], TOOLS),
        Conversation("call after text", (user("Look."), reply("I look.", [paris]), result("rain", paris)), TOOLS),
        Conversation("call without arguments", (user("When?"), reply(calls=[noon]), result("noon", noon)), TOOLS),
        Conversation(
            "parallel calls",
            (*looped[:1], reply(calls=[paris, rome]), result("rain", paris), result("sun", rome)),
            TOOLS,
        ),
        Conversation("chain of calls", looped, TOOLS),
        Conversation("question after calls", (*looped, reply("Rome is better."), user("Why?")), TOOLS),
        Conversation("question with tools", plain, TOOLS),
        Conversation("result and question", (*looped[:3], user("And?")), TOOLS),
        Conversation("system message later", (*plain[:2], system("Be rude."), user("Go on."))),
        Conversation("answer among the new", (*plain[:2], user("A?"), reply("B."), user("C?"))),
        Conversation("thinking on", (user("Hi"), thought, user("Go on.")), options=on),
        Conversation("thinking off", plain, options=off),
        Conversation(
            "reasoned calls", (user("Go."), reply("", [paris], "I should look."), result("rain", paris)), TOOLS, on
        ),
        Conversation("empty result", (*looped[:2], result("", paris)), TOOLS),
        Conversation("odd text", (system(odd), user(odd), reply(odd), user(odd))),
        Conversation("odd calls", (user(odd), reply(calls=[odd_call]), result(odd, odd_call)), TOOLS),
        Conversation("odd argument names", (user("Go."), reply(calls=[odd_name]), result("rain", odd_name)), TOOLS),
        Conversation("huge arguments", (user("Go."), reply(calls=[huge]), result("rain", huge)), TOOLS),
        Conversation("broken arguments", (user("Go."), reply(calls=[broken]), result("no such city", broken)), TOOLS),
        Conversation("cut answer", plain, cut=True),
        Conversation("cut reasoning", (user("Hi"), thought, user("Go on.")), options=on, cut=True),
        Conversation("cut call", looped[:3], TOOLS, cut=True),
    )


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def reply(text: str | None = None, calls: Sequence[Message] = (), reasoning: str = "") -> Message:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    return {**message, "reasoning_content": reasoning} if reasoning else message


def call(name: str, arguments: Any, number: int) -> Message:
    """A tool call; arguments that are text stay as they are, broken or not. The id has a form that no template minds, and that those which
    write ids instead of names can read."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": text}}


def result(text: str, answers: Message) -> Message:
    """A tool's result for a call."""
    return {"role": "tool", "content": text, "tool_call_id": answers["id"]}
