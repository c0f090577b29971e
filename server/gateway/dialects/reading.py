"""What every dialect needs to read a body safely: JSON in and out without surprises, messages and tools checked in depth.

In: bytes, or values that were decoded from them. Out: values, or a SessionError 400 that says where the fault is. Nothing waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from palestra.server.renderer.text import TEXT_PARTS
from palestra.server.types import SessionError

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
TOO_DEEP = "request body is nested too deeply"

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of JSON's strings; group 1 is a surrogate without its other half."""

_any = msgspec.json.Decoder().decode


def without_lone_surrogates(body: bytes) -> bytes:
    """JSON in which half a surrogate pair is U+FFFD, as the tokenizer has it: a text that was cut inside an emoji is no reason to refuse a
    call, and no decoder here reads it otherwise. Slow: for bodies that could not be read."""
    return _ESCAPE.sub(lambda found: found[0] if found[1] is None else b"\\ufffd", body)


def mended(decoder: Callable[[bytes], T], raw: bytes) -> T:
    """What `decoder` makes of JSON, which is mended where half a surrogate pair is what keeps it from being read."""
    try:
        return decoder(raw)
    except msgspec.DecodeError:
        if (whole := without_lone_surrogates(raw)) == raw:
            raise
        return decoder(whole)


def decode(decoder: Callable[[bytes], T], body: bytes) -> T:
    """The body as `decoder` sees it. Parts that stay raw are known to be UTF-8 after this.

    Raises:
        SessionError: 400 for anything but well-formed JSON of the right types.
    """
    try:
        if not body.isascii():
            body.decode()
        return mended(decoder, body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SessionError(f"request body: {error}") from None
    except RecursionError:
        raise SessionError(TOO_DEEP) from None


def decode_list(raw: bytes, where: str) -> list[Any]:
    """A JSON array that was kept raw.

    Raises:
        SessionError: 400 where it is none.
    """
    try:
        value = mended(_any, raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SessionError(f"{where}: {error}") from None
    except RecursionError:
        raise SessionError(f"{where} is nested too deeply") from None
    if not isinstance(value, list):
        raise SessionError(f"{where} must be an array, got {kind(value)}")
    return value


def encode(value: Any) -> bytes:
    """Decoded values as JSON again, integers of any size included.

    Raises:
        SessionError: 400 for what is nested too deeply.
    """
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise SessionError(TOO_DEEP) from None


def must_echo(value: T, names: str) -> T:
    """The value itself, where the reply can repeat it: orjson writes neither integers beyond 64 bits nor very deep nesting.

    Raises:
        SessionError: 400 naming the fields it came from.
    """
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise SessionError(f"{names}: {error}") from None
    return value


def kind(value: Any) -> str:
    """A JSON value's type, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, Sequence) else "an object"


def need(value: Any, wanted: type[T], where: str, what: str) -> T:
    """The value, known to be of one type.

    Raises:
        SessionError: 400 where it is of another one.
    """
    if not isinstance(value, wanted):
        raise SessionError(f"{where} must be {what}, got {kind(value)}")
    return value


def need_text(value: Any, where: str, *, empty: bool = True) -> str:
    """The value, known to be text; with `empty` False there must be some.

    Raises:
        SessionError: 400 otherwise.
    """
    text = need(value, str, where, "a string")
    if not text and not empty:
        raise SessionError(f"{where} is empty")
    return text


def check_messages(messages: Sequence[Any], start: int = 0) -> None:
    """Messages in OpenAI's form, checked in depth; `start` is the index of the first one in its request.

    Raises:
        SessionError: 400 for an unknown role, content that is not text, and calls that name no function.
    """
    for at, message in enumerate(messages, start):
        where = f"messages[{at}]"
        need(message, dict, where, "an object")
        role = message.get("role")
        if role not in ROLES:
            raise SessionError(f"{where}.role is {role!r:.80}; known: {', '.join(ROLES)}")
        _check_content(message.get("content"), f"{where}.content")
        if role == "assistant":
            _check_assistant(message, where)
        elif role == "tool" and not isinstance(message.get("tool_call_id"), str | None):
            raise SessionError(f"{where}.tool_call_id must be a string, got {kind(message['tool_call_id'])}")


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    need(content, list, where, "a string or an array of parts")
    for at, part in enumerate(content):
        need(part, dict, f"{where}[{at}]", "an object")
        if part.get("type") not in TEXT_PARTS:
            raise SessionError(f"{where}[{at}].type is {part.get('type')!r:.80}; only text can be given to this model")
        need_text(part.get("text"), f"{where}[{at}].text")


def _check_assistant(message: Mapping[str, Any], where: str) -> None:
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        need_text(reasoning, f"{where}.reasoning_content")
    calls = message.get("tool_calls")
    if calls is None:
        return
    for at, call in enumerate(need(calls, list, f"{where}.tool_calls", "an array")):
        here = f"{where}.tool_calls[{at}]"
        need(call, dict, here, "an object")
        if call.get("id") is not None:
            need_text(call["id"], f"{here}.id")
        function = need(call.get("function"), dict, f"{here}.function", "an object")
        need_text(function.get("name"), f"{here}.function.name", empty=False)
        if not isinstance(function.get("arguments"), str | dict | None):
            got = kind(function["arguments"])
            raise SessionError(f"{here}.function.arguments must be a string of JSON, got {got}")


def check_tools(tools: Sequence[Any]) -> None:
    """Tools in OpenAI's chat form, checked in depth.

    Raises:
        SessionError: 400 for a tool that is no function, has no name, or whose parameters are no object.
    """
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        need(tool, dict, where, "an object")
        if tool.get("type") != "function":
            raise SessionError(f"{where}.type is {tool.get('type')!r:.80}; only tools of type 'function' are known")
        check_function(tool.get("function"), f"{where}.function")


def check_function(function: Any, where: str) -> None:
    """The description of one function, as a chat tool, a Responses tool and the old `functions` hold it.

    Raises:
        SessionError: 400 where it has no name, or where its parts are of the wrong type.
    """
    need(function, dict, where, "an object")
    need_text(function.get("name"), f"{where}.name", empty=False)
    if function.get("description") is not None:
        need_text(function["description"], f"{where}.description")
    if function.get("parameters") is not None:
        need(function["parameters"], dict, f"{where}.parameters", "an object")
