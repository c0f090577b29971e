"""Assistant messages for oracles, scripts and tests: an answer, or calls of tools."""

from __future__ import annotations

import json
from typing import Any

from palestra.envs.tools import call_message
from palestra.envs.types import Message


def say(text: str) -> Message:
    """An assistant message without calls: an answer."""
    return {"role": "assistant", "content": text}


def call(name: str, /, **arguments: Any) -> Message:
    """An assistant message with one call of the tool `name`. The environment gives the call its id."""
    return raw_call(name, json.dumps(arguments, ensure_ascii=False))


def raw_call(name: str, arguments: Any) -> Message:
    """The same with arguments as they stand: text that need not be JSON."""
    return call_message(name, arguments)
