"""Chat's old way to call tools, `functions` and `function_call`, in terms of the present one. Pure.

Such requests are rare, so all of their messages are decoded. The ids that the old form lacks are counted out, so that the same history
always gives the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.server.gateway.dialects.reading import check_function, decode_list, encode
from palestra.server.types import SessionError


def tools_of(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`functions` as tools.

    Raises:
        SessionError: 400 for one without a name.
    """
    for at, function in enumerate(functions):
        check_function(function, f"functions[{at}]")
    return [{"type": "function", "function": function} for function in functions]


def choice_of(function_call: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """`function_call` as a tool choice."""
    if isinstance(function_call, dict):
        return {"type": "function", "function": function_call}
    return function_call


def messages_of(raw: bytes) -> bytes:
    """Messages whose calls and results are in the old form, in the present one.

    Raises:
        SessionError: 400 where they are no array of objects.
    """
    messages, calls = decode_list(raw, "messages"), 0
    out: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise SessionError(f"messages[{at}] must be an object")
        called = message.get("function_call")
        if message.get("role") == "assistant" and called is not None:
            calls += 1
            rest = {key: value for key, value in message.items() if key != "function_call"}
            out.append({**rest, "tool_calls": [{"id": f"call_{calls}", "type": "function", "function": called}]})
        elif message.get("role") == "function":
            out.append({"role": "tool", "tool_call_id": f"call_{calls}", "content": message.get("content")})
        else:
            out.append(message)
    return encode(out)


def call_of(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A reply's first call in the old form, which knows only one."""
    calls = message.get("tool_calls")
    if not calls:
        return None
    function: Mapping[str, Any] = calls[0]["function"]
    return function
