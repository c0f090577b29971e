"""Items of the Responses API as chat messages. Pure.

A reply of this API is several items (reasoning, message, function calls), which a caller sends back one by one. They become one assistant
message again here, so that the conversation tree recognises its own reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.server.gateway.dialects.reading import check_function, need, need_text
from palestra.server.gateway.types import Message
from palestra.server.types import SessionError

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def messages_of(given: str | Sequence[Any], earlier: Sequence[Message], instructions: str | None) -> list[Message]:
    """The whole conversation: `earlier` is that of the reply that the request continues.

    Instructions take the place of the system message that the conversation begins with; without them it keeps the one it has, since
    dropping it would change what the model has seen.

    Raises:
        SessionError: 400 for an item that is no text, message, function call or its output.
    """
    messages = list(earlier)
    if instructions is not None:
        begun = bool(messages) and messages[0]["role"] == "system"
        messages[: int(begun)] = [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    reader = _Reader()
    for at, item in enumerate(given):
        reader.read(need(item, dict, f"input[{at}]", "an object"), f"input[{at}]")
    reader.flush()
    return messages + reader.messages


class _Reader:
    """Gathers the items of one assistant turn until something else comes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: dict[str, Any] = {}

    def read(self, item: Mapping[str, Any], where: str) -> None:
        match item.get("type") or "message":
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self.flush()
                call_id = need_text(item.get("call_id"), f"{where}.call_id")
                text = text_of(item.get("output"), f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case "item_reference":
                raise SessionError(
                    f"{where}: items are not kept under their ids; send the item, or previous_response_id"
                )
            case other:
                raise SessionError(
                    f"{where}.type is {other!r:.80}; known: message, reasoning, function_call, function_call_output"
                )

    def flush(self) -> None:
        """Ends the assistant turn that was being gathered, if there is one."""
        if self._turn:
            self.messages.append({"role": "assistant", "content": "", **self._turn})
            self._turn = {}

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, text = item.get("role"), text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            if "content" in self._turn:
                self.flush()
            self._turn["content"] = text
        elif role in ("system", "developer", "user"):
            self.flush()
            self.messages.append({"role": role, "content": text})
        else:
            raise SessionError(f"{where}.role is {role!r:.80}; known: system, developer, user, assistant")

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Reasoning opens a turn. What of it is encrypted was not written by this service and says nothing to the model."""
        self.flush()
        text = text_of(item.get("content") or item.get("summary") or "", f"{where}.content")
        if text:
            self._turn["reasoning_content"] = text

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        name = need_text(item.get("name"), f"{where}.name", empty=False)
        call_id = need_text(item.get("call_id"), f"{where}.call_id")
        arguments = need_text(item.get("arguments"), f"{where}.arguments")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn.setdefault("tool_calls", []).append(call)


def text_of(content: Any, where: str) -> str:
    """Content as text: a string, or parts that are joined.

    Raises:
        SessionError: 400 for a part that is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(need(content, list, where, "a string or an array of parts")):
        here = f"{where}[{at}]"
        kind = need(part, dict, here, "an object").get("type")
        if kind not in _TEXTS:
            raise SessionError(f"{here}.type is {kind!r:.80}; only text can be given to this model")
        key = "refusal" if kind == "refusal" else "text"
        texts.append(need_text(part.get(key), f"{here}.{key}"))
    return "".join(texts)


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Function tools in chat's form.

    Raises:
        SessionError: 400 for a built-in tool, by its name.
    """
    found = []
    for at, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise SessionError(f"tools[{at}].type is {kind!r:.80}: built-in tools do not exist here, only functions")
        check_function(tool, f"tools[{at}]")
        kept = ("name", "description", "parameters")
        function = {key: tool[key] for key in kept if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found
