"""What a model may write: messages of odd shape, arguments that do not fit a tool, and answers of absurd length.

A tool's description goes in where one is needed, assistant messages come out; the same ones each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from palestra.envs.checking.scripts import raw_call, say
from palestra.envs.types import Message, ToolSpec

FUZZED: tuple[Message, ...] = (
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "\u2028 \U0001f600 \x00 <|im_end|> " * 50},
    {"role": "assistant", "content": [{"type": "text", "text": "parts"}], "reasoning_content": "hm"},
    {"role": "assistant", "content": "x", "tool_calls": []},
    {"role": "assistant", "content": "", "tool_calls": [{}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": None}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": None, "arguments": 5}}]},
)

BROKEN_ARGUMENTS: tuple[Any, ...] = (
    "",
    "{",
    "null",
    "[]",
    '"text"',
    '"{}"',
    "{} {}",
    "NaN",
    '{"surely_no_parameter": 1}',
    '{"surely_no_parameter": 1e400}',
    "[" * 20_000,
    "9" * 5_000,
    "\ud800",
    None,
    5,
    {"surely_no_parameter": [1]},
)
"""Of a call: what no tool takes, beside `{}`, which some do."""

_ODD: tuple[Any, ...] = (None, [], {}, -1, 1e308, "", "\u0000\u2028", [[[]]])
_LENGTH = 100_000
LONG: tuple[Message, ...] = (
    say(" " * _LENGTH),
    say("9" * _LENGTH),
    say("-" * _LENGTH + "!"),
    say("a b " * (_LENGTH // 4)),
    say("<answer>" * (_LENGTH // 8)),
    say("\\boxed{" * (_LENGTH // 7)),
    say("{" * _LENGTH + "}" * _LENGTH),
    say("```python\n" * (_LENGTH // 10)),
)
"""Answers that a careless pattern takes minutes for."""


def wrong_calls(spec: ToolSpec) -> Iterator[Message]:
    """Calls of one tool with arguments that do not fit its schema, one a message."""
    function = spec["function"]
    for arguments in BROKEN_ARGUMENTS:
        yield raw_call(function["name"], arguments)
    properties = function["parameters"].get("properties", {})
    for name in properties:
        for value in _ODD:
            yield raw_call(function["name"], json.dumps({name: value}))
