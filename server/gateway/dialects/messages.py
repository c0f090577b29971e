"""Anthropic's messages on the wire. Pure; nothing waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec
import orjson

from palestra.server.gateway.dialects import blocks
from palestra.server.gateway.dialects.asking import (
    Count,
    Objects,
    Sampled,
    StopTexts,
    choose_tools,
    sampling_of,
    schema_of,
    thinking_of,
)
from palestra.server.gateway.dialects.reading import decode, encode
from palestra.server.gateway.dialects.sse import event, pieces
from palestra.server.gateway.types import Choice, ModelCall, ModelReply, Recall, Usage, status_of
from palestra.server.types import ServerError, SessionError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types of the API's errors by their status; other faults of ours are `api_error`."""
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
"""What `thinking.type` asks of the model; None leaves it to the model."""


class OutputWish(msgspec.Struct):
    """`output_config`: effort, and the form of the reply's text."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(Sampled, kw_only=True):
    """What of `/v1/messages` is understood; other fields are accepted and have no effect."""

    messages: Objects
    max_tokens: Count | None = None
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: StopTexts | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputWish | None = None


_decode = msgspec.json.Decoder(MessagesRequest).decode


class MessagesDialect:
    """`/v1/messages`."""

    name = "messages"
    ping: ClassVar[bytes] = event({"type": "ping"}, "ping")

    def read(self, body: bytes, recall: Recall) -> ModelCall:
        """A checked call. See `Dialect.read`."""
        asked = decode(_decode, body)
        if not asked.messages:
            raise SessionError("messages is empty")
        messages = blocks.messages_of(asked.system, asked.messages)
        wish = asked.tool_choice or {}
        choice, tools = choose_tools(_choice_of(wish), blocks.tools_of(asked.tools or ()))
        output = asked.output_config or OutputWish()
        thinking, effort = thinking_of(asked.chat_template_kwargs, output.effort, "output_config.effort")
        if asked.thinking is not None:
            kind = asked.thinking.get("type")
            if not isinstance(kind, str) or kind not in _THINKING:
                raise SessionError(f"thinking.type is {kind!r:.80}; known: {', '.join(_THINKING)}")
            thinking = _THINKING[kind]
        return ModelCall(
            messages=encode(messages),
            tools=encode(tools) if tools else b"",
            model=asked.model or "",
            stream=bool(asked.stream),
            max_tokens=asked.max_tokens,
            stop=tuple(asked.stop_sequences or ()),
            sampling=sampling_of(asked),
            response_schema=schema_of(output.format, "output_config.format", nested=False),
            tool_choice=choice if tools else None,
            parallel_tool_calls=wish.get("disable_parallel_tool_use") is not True,
            thinking=thinking,
            effort=effort,
            forced_ids=tuple(asked.forced_ids or ()),
        )

    def reply(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """A `message` object."""
        choice = reply.choices[0]
        content = _blocks_of(choice.message, reply.reply_id)
        return _message(reply, content, _usage(reply.usage), *_stop_of(choice))

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[bytes]:
        """`message_start`, each block with its deltas, `message_delta` with the reason and the usage, `message_stop`."""
        choice, usage = reply.choices[0], _usage(reply.usage)
        opened = _message(reply, [], {**usage, "output_tokens": 0}, None, None)
        yield event({"type": "message_start", "message": opened}, "message_start")
        calls = iter(choice.message.get("tool_calls") or ())
        for index, block in enumerate(_blocks_of(choice.message, reply.reply_id)):
            arguments = _arguments_of(next(calls), block) if block["type"] == "tool_use" else ""
            yield from _block_events(index, block, arguments)
        reason, text = _stop_of(choice)
        ended = {"stop_reason": reason, "stop_sequence": text}
        yield event({"type": "message_delta", "delta": ended, "usage": usage}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error(self, error: ServerError, status: int) -> dict[str, Any]:
        """An error's body. `code` is ours: it tells a spent budget from a malformed request."""
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error), "code": status_of(error)[1]}}

    def error_event(self, error: ServerError, status: int) -> bytes:
        """An `error` event, after which the stream ends."""
        return event(self.error(error, status), "error")


def _choice_of(wish: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """The API's tool choice in OpenAI's words."""
    match wish.get("type"):
        case None if not wish:
            return None
        case "auto" | "none" as same:
            return str(same)
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "name": wish.get("name")}
        case other:
            raise SessionError(f"tool_choice.type is {other!r:.80}; known: auto, any, tool, none")


def _blocks_of(said: Mapping[str, Any], reply_id: str) -> list[dict[str, Any]]:
    """The reply's content. The signature of its thinking only names the reply: clients send it back and want one to be there."""
    found: list[dict[str, Any]] = []
    if said.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": reply_id})
    if said.get("content"):
        found.append({"type": "text", "text": said["content"], "citations": None})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        given = blocks.input_of(function["arguments"])
        found.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return found


def _arguments_of(call: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    """The JSON text that streams a tool_use's input: the model's own, where it is an object."""
    if blocks.UNPARSED in block["input"]:
        return orjson.dumps(block["input"]).decode()
    return str(call["function"]["arguments"])


def _block_events(index: int, block: Mapping[str, Any], arguments: str) -> Iterator[bytes]:
    kinds = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    keys = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    hollow: dict[str, dict[str, Any]] = {
        "thinking": {"thinking": "", "signature": ""},
        "text": {"text": ""},
        "tool_use": {"input": {}},
    }
    kind = block["type"]
    start = {"type": "content_block_start", "index": index, "content_block": {**block, **hollow[kind]}}
    yield event(start, "content_block_start")
    for piece in pieces(arguments if kind == "tool_use" else block[kind]):
        yield _delta(index, {"type": kinds[kind], keys[kind]: piece})
    if kind == "thinking":
        yield _delta(index, {"type": "signature_delta", "signature": block["signature"]})
    yield event({"type": "content_block_stop", "index": index}, "content_block_stop")


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")


def _message(
    reply: ModelReply, content: list[dict[str, Any]], usage: dict[str, int], reason: str | None, text: str | None
) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": text,
        "usage": usage,
    }


def _stop_of(choice: Choice) -> tuple[str, str | None]:
    """The stop reason, and the stop text behind it, if one is."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    return ("end_turn", None) if choice.stop_text is None else ("stop_sequence", choice.stop_text)


def _usage(usage: Usage) -> dict[str, int]:
    """Token counts: what came from the cache is no input here."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
