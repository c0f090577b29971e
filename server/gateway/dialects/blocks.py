"""Content blocks of Anthropic's messages as chat messages, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import orjson

from palestra.server.gateway.dialects.reading import encode, need, need_text
from palestra.server.gateway.types import Message
from palestra.server.types import SessionError

BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a line with a hash of the request before its system prompt. It says nothing to a model, and would make every request the
start of a new conversation."""
UNPARSED = "unparsed_arguments"
"""The one key of a tool_use's input where the model's arguments are no JSON object; its value is their text."""


def messages_of(system: str | Sequence[Any] | None, turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation in OpenAI's form. An assistant message at its end stays there: the reply goes on from it.

    Raises:
        SessionError: 400 for a role or a block that cannot be said in text, with its place.
    """
    messages: list[Message] = []
    if prompt := _system_parts(system):
        messages.append({"role": "system", "content": _content(prompt)})
    for at, turn in enumerate(turns):
        where = f"messages[{at}]"
        content = turn.get("content")
        blocks = (
            [content] if isinstance(content, str) else need(content, list, f"{where}.content", "a string or an array")
        )
        match turn.get("role"):
            case "user":
                messages += _user(blocks, f"{where}.content")
            case "assistant":
                messages.append(_assistant(blocks, f"{where}.content"))
            case "system":
                texts = [_text(block, f"{where}.content[{i}]") for i, block in enumerate(blocks)]
                messages.append({"role": "system", "content": _content(texts)})
            case role:
                raise SessionError(f"{where}.role is {role!r:.80}; known: user, assistant, system")
    return messages


def _system_parts(system: str | Sequence[Any] | None) -> list[str]:
    if isinstance(system, str):
        if system.startswith(BILLING):
            system = system.partition("\n")[2]
        return [system] if system else []
    texts = [_text(block, f"system[{at}]") for at, block in enumerate(system or ())]
    return [text for text in texts if not text.startswith(BILLING)]


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Several blocks stay several parts: how they are joined is the renderer's business."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _user(blocks: Sequence[Any], where: str) -> list[Message]:
    """Results of tools are messages of their own, in the order of the blocks; the text between them is the user's."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": _content(texts)})
            texts.clear()

    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        if not isinstance(block, Mapping) or block.get("type") != "tool_result":
            texts.append(_text(block, here))
            continue
        flush()
        call_id = need_text(block.get("tool_use_id"), f"{here}.tool_use_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _result(block.get("content"), here)})
    flush()
    return messages or [{"role": "user", "content": ""}]


def _result(content: Any, where: str) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    blocks = need(content, list, f"{where}.content", "a string or an array")
    texts = [_text(block, f"{where}.content[{at}]") for at, block in enumerate(blocks)]
    return _content(texts)


def _assistant(blocks: Sequence[Any], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        match block.get("type") if isinstance(block, Mapping) else "text":
            case "thinking":
                thoughts.append(need_text(block.get("thinking"), f"{here}.thinking"))
            case "redacted_thinking":
                continue  # written elsewhere, and unreadable: it says nothing to the model
            case "tool_use":
                calls.append(_call(block, here))
            case _:
                texts.append(_text(block, here))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = need(block.get("input"), dict, f"{where}.input", "an object")
    raw = given.get(UNPARSED)
    arguments = raw if isinstance(raw, str) and len(given) == 1 else encode(given).decode()
    name = need_text(block.get("name"), f"{where}.name", empty=False)
    call_id = need_text(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(block: Any, where: str) -> str:
    if isinstance(block, str):
        return block
    need(block, dict, where, "an object")
    if block.get("type") != "text":
        _refuse(block, where)
    return need_text(block.get("text"), f"{where}.text")


def _refuse(block: Mapping[str, Any], where: str) -> NoReturn:
    raise SessionError(f"{where}.type is {block.get('type')!r:.80}, which cannot be given to this model here")


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form.

    Raises:
        SessionError: 400 for tools of the API's own, by name.
    """
    found = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.get("type") not in (None, "custom"):
            kind = tool["type"]
            raise SessionError(
                f"{where}.type is {kind!r:.80}: tools of the API's own do not exist here, only custom ones"
            )
        name = need_text(tool.get("name"), f"{where}.name", empty=False)
        schema = need(tool.get("input_schema"), dict, f"{where}.input_schema", "an object")
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = need_text(tool["description"], f"{where}.description")
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found


def input_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as a tool_use's input. `messages_of` reads what this gives back as the same arguments."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}
