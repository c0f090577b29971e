"""The code in a model's reply. Read line by line, with a bound on its length, and never parsed or run out here. Waits for nothing."""

from __future__ import annotations

import re
from typing import Any

MOST_TEXT = 64 * 1024
"""Characters of a reply that is read; of a longer one nothing is."""
_FENCE = re.compile(r" {0,3}(`{3,})")


def fenced_blocks(text: str) -> list[str]:
    """What stands in fenced blocks that were closed, in order. A reply that was cut in the middle of a block has not given it."""
    blocks: list[str] = []
    inside: list[str] | None = None
    ticks = 0
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        length = len(fence[1]) if fence else 0
        if inside is None:
            if length:
                inside, ticks = [], length
        elif length >= ticks and not line.strip().strip("`"):
            blocks.append("".join(inside))
            inside = None
        else:
            inside.append(line + "\n")
    return blocks


def defines(code: str, entry: str) -> bool:
    """Whether a line at the margin defines `entry`. What merely looks so fails when it is run."""
    marks = re.compile(rf"(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b|{re.escape(entry)}[ \t]*=(?!=)")
    return any(marks.match(line) for line in code.split("\n"))


def final_text(message: dict[str, Any]) -> str:
    """The text of a message that ends an episode; "" where it is no final one, has no text, or too much of it."""
    content = message.get("content")
    if message.get("role") != "assistant" or message.get("tool_calls") or not isinstance(content, str):
        return ""
    return content if len(content) <= MOST_TEXT else ""


def read_code(text: str, entry: str) -> str | None:
    """The last fenced block that defines `entry`; with `entry` "" the last block that is not empty. None where there is none."""
    for block in reversed(fenced_blocks(text)):
        if defines(block, entry) if entry else block.strip():
            return block
    return None
