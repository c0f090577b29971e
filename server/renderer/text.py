"""What chat families share below the level of tokens: the text of a message, the arguments of a call, calls written as JSON. Pure."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from palestra.server.renderer.tokens import without_surrogates
from palestra.server.renderer.types import Message
from palestra.server.types import RenderError

TEXT_PARTS = ("text", "input_text", "output_text")
LITERAL_STARTS = tuple("{[-0123456789tfn")


def text_of(message: Message) -> str:
    """A message's content as text; None is the empty string, text parts are joined.

    Raises:
        RenderError: a part that is not text.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RenderError(f"content part of type {kind!r}: only text can be rendered")
            parts.append(str(part.get("text", "")))
        return "".join(parts)
    raise RenderError(f"content must be text, got {type(content).__name__}")


def arguments_value(call: Message) -> Any:
    """A call's arguments as a JSON value; text that does not parse stays text, no arguments are an empty object."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def arguments_text(call: Message) -> str:
    """A call's arguments as the JSON text to render: an object is spelled out, text that parses is normalised, other text stays."""
    try:
        return spelled(arguments_value(call))
    except RecursionError:
        return str(call["function"]["arguments"])


def json_text(value: Any) -> str:
    """A value as JSON, characters as they are; escaped where it holds a lone surrogate, which no UTF-8 carries."""
    text = json.dumps(value, ensure_ascii=False)
    return text if without_surrogates(text) == text else json.dumps(value)


def literal(text: str, words: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The value of an argument that a family writes without quotes: the tool's schema is not known where a reply is parsed, so what spells
    a JSON object, array, number, boolean or null is that, and all else is a string. A string that looks like a number comes back as one.
    `words` are further spellings."""
    bare = text.strip()
    if bare in words:
        return words[bare]
    try:
        value = json.loads(bare, parse_constant=_no_constant) if bare[:1] in LITERAL_STARTS else text
    except (ValueError, RecursionError):
        return text
    return value


def spelled(value: Any) -> str:
    """The reverse of `literal`: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else json_text(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def make_call(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """A tool call in OpenAI's form, under a fresh id unless the model gave one."""
    return {
        "id": call_id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": without_surrogates(name), "arguments": without_surrogates(arguments)},
    }


def is_name(value: Any) -> bool:
    """Whether a JSON value can name a tool. Nothing and white space cannot: no caller could send such a call back."""
    return isinstance(value, str) and bool(value.strip())


_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def call_of(body: str) -> tuple[dict[str, Any] | None, str | None]:
    """A call from the JSON text of one block, and what is wrong with it. JSON that is broken or cut still names its tool where it can, and
    hands over its raw arguments: the environment answers with an error under the same call id, and the episode goes on."""
    try:
        value = json.loads(body, strict=False)
        if not isinstance(value, dict) or not is_name(value.get("name")):
            return None, "a call without a name"
        return make_call(value["name"], spelled(value.get("arguments", value.get("parameters", {})))), None
    except (ValueError, RecursionError):
        name, arguments = _NAME.search(body), _ARGUMENTS.search(body)
        if name is None or not is_name(name[1]):
            return None, "a call that is no JSON and names no tool"
        raw = body[arguments.end() :].strip() if arguments else ""
        return make_call(name[1], raw or "{"), "a call that is no JSON"


def strip_end(ids: Sequence[int], stop_ids: Sequence[int]) -> Sequence[int]:
    """The ids without the end token, if there is one."""
    return ids[:-1] if ids and ids[-1] in stop_ids else ids
