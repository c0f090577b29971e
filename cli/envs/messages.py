"""Messages on a console: who speaks, what is said, which tools are called. Text of others is printed as it is, control characters shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from palestra.envs.rubrics.types import text_of
from palestra.envs.types import Message, Reward

STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_message(console: Console, message: Message) -> None:
    """Prints one message."""
    role = str(message.get("role"))
    who = f"{role} {message['name']}" if role == "tool" and message.get("name") else role
    text = text_of(message.get("content"))
    if text:
        console.print(_line(who, text, STYLES.get(role, "")))
    for call in message.get("tool_calls") or ():
        console.print(_line(who, _call(call), STYLES.get(role, "")))
    if not text and not message.get("tool_calls"):
        console.print(_line(who, "(nothing)", "dim"))


def print_reward(console: Console, reward: Reward) -> None:
    """Prints what an episode earned, part by part."""
    value = "unknown" if reward.value is None else f"{reward.value:g}"
    console.print(Text.assemble(("reward ", "bold"), (value, "bold")))
    for name, part in reward.components.items():
        console.print(Text(f"  {name:20} {part:g}"))
    if reward.note:
        console.print(Text(f"  {printable(reward.note)}"))


def printable(text: str) -> str:
    """The text with control characters shown, not obeyed: a terminal would follow them."""
    return "".join(char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in text)


def _line(who: str, text: str, style: str) -> Text:
    body = printable(text).replace("\n", "\n" + " " * 12)
    return Text.assemble((f"{who:>10}  ", f"{style} bold"), body)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name')} {written}"
