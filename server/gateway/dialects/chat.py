"""OpenAI's chat completions on the wire. Pure; nothing waits.

This is the hot path: messages and tools stay the bytes that they came as, since the conversation tree has seen all but the newest before.
`reading.check_messages` and `check_tools` check them in depth when they are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import msgspec
import orjson

from palestra.server.gateway.dialects import legacy
from palestra.server.gateway.dialects.asking import (
    Count,
    Objects,
    RawArray,
    RawObjects,
    Replies,
    Sampled,
    StopText,
    StopTexts,
    StreamOptions,
    Top,
    choose_tools,
    sampling_of,
    schema_of,
    stops_of,
    thinking_of,
)
from palestra.server.gateway.dialects.reading import check_tools, decode, decode_list, encode
from palestra.server.gateway.dialects.shapes import OpenAIErrors, content_of, logprobs_of, usage_of
from palestra.server.gateway.dialects.sse import DONE, TokenDealer, pieces
from palestra.server.gateway.types import Choice, ModelCall, ModelReply, Recall
from palestra.server.types import SessionError


class ChatRequest(Sampled, kw_only=True):
    """What of `/v1/chat/completions` is understood; other fields are accepted and have no effect."""

    messages: RawArray
    tools: RawObjects = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    n: Replies | None = None
    stop: StopText | StopTexts | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(ChatRequest).decode


class ChatDialect(OpenAIErrors):
    """`/v1/chat/completions`."""

    name = "chat"

    def read(self, body: bytes, recall: Recall) -> ModelCall:
        """A checked call. See `Dialect.read`; messages and tools are known to be arrays, and are checked in depth later."""
        asked = decode(_decode, body)
        _refuse_other_media(asked)
        messages = bytes(asked.messages)
        if messages[:1] != b"[":
            raise SessionError("messages must be an array")
        if messages[1:].lstrip()[:1] == b"]":
            raise SessionError("messages is empty")
        old = asked.functions is not None
        if old:
            messages = legacy.messages_of(messages)
        tools, choice = _tools_of(asked)
        effort = asked.reasoning_effort
        thinking, effort = thinking_of(asked.chat_template_kwargs, effort, "reasoning_effort")
        if asked.top_logprobs and not asked.logprobs:
            raise SessionError("top_logprobs needs logprobs to be true")
        options = asked.stream_options
        return ModelCall(
            messages=messages,
            tools=tools,
            model=asked.model or "",
            n=asked.n or 1,
            stream=bool(asked.stream),
            include_usage=options is not None and bool(options.include_usage),
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            stop=stops_of(asked.stop),
            sampling=sampling_of(asked),
            logprobs=bool(asked.logprobs),
            top_logprobs=asked.top_logprobs or 0,
            response_schema=schema_of(asked.response_format, "response_format", nested=True),
            tool_choice=choice,
            parallel_tool_calls=asked.parallel_tool_calls is not False and not old,
            thinking=thinking,
            effort=effort,
            forced_ids=tuple(asked.forced_ids or ()),
            extra={"functions": True} if old else {},
        )

    def reply(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """A `chat.completion` object."""
        return {
            "id": f"chatcmpl-{reply.reply_id}",
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [_choice(call, index, choice) for index, choice in enumerate(reply.choices)],
            "usage": usage_of(reply.usage),
        }

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[bytes]:
        """`chat.completion.chunk` events, the choices in turn, then the usage where it was asked for, then the end."""
        about = orjson.dumps(
            {
                "id": f"chatcmpl-{reply.reply_id}",
                "object": "chat.completion.chunk",
                "created": reply.created,
                "model": reply.model,
            }
        )[:-1]
        tail = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"
        chunks = [_chunks(call, index, choice) for index, choice in enumerate(reply.choices)]
        for together in zip_longest(*chunks):
            for chunk in together:
                if chunk is not None:
                    yield b'data: %s,"choices":[%s]%s' % (about, chunk, tail)
        if call.include_usage:
            yield b'data: %s,"choices":[],"usage":%s}\n\n' % (about, orjson.dumps(usage_of(reply.usage)))
        yield DONE


def _refuse_other_media(asked: ChatRequest) -> None:
    for modality in asked.modalities or ():
        if modality != "text":
            raise SessionError(f"modalities holds {modality!r:.80}: this model only writes text")
    if asked.audio is not None:
        raise SessionError("audio: this model only writes text")


def _tools_of(asked: ChatRequest) -> tuple[bytes, str | None]:
    """The tools as JSON, b"" for none, and the choice among them. They are decoded only where the choice speaks of some of them."""
    raw, choice = bytes(asked.tools), asked.tool_choice
    if raw == b"null" or raw[1:].lstrip() == b"]":
        raw = b""
    if asked.functions is not None:
        if raw or choice is not None:
            raise SessionError("functions and tools cannot be given together")
        tools = legacy.tools_of(asked.functions)
        name, _ = choose_tools(legacy.choice_of(asked.function_call), tools)
        return encode(tools) if tools else b"", name if tools else None
    if raw and raw[:1] != b"[":
        raise SessionError("tools must be an array")
    if choice is None:
        return raw, None
    if not isinstance(choice, dict):
        name, _ = choose_tools(choice, [{}] if raw else [])
        return raw, name if raw else None
    tools = decode_list(raw, "tools") if raw else []
    check_tools(tools)
    name, kept = choose_tools(choice, tools)
    return (raw if len(kept) == len(tools) else encode(kept)), name


def _finish(call: ModelCall, choice: Choice) -> str:
    if choice.finish_reason == "tool_calls" and "functions" in call.extra:
        return "function_call"
    return choice.finish_reason


def _choice(call: ModelCall, index: int, choice: Choice) -> dict[str, Any]:
    said = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": content_of(said), "refusal": None}
    if said.get("reasoning_content"):
        message["reasoning_content"] = said["reasoning_content"]
    if said.get("tool_calls"):
        if "functions" in call.extra:
            message["function_call"] = legacy.call_of(said)
        else:
            message["tool_calls"] = said["tool_calls"]
    logprobs = {"content": logprobs_of(choice.tokens), "refusal": None} if call.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(call, choice)}


def _chunks(call: ModelCall, index: int, choice: Choice) -> Iterator[bytes]:
    """The `choices` entries of one choice's chunks."""
    dealer = TokenDealer(choice.tokens) if call.logprobs else None
    head, plain = b'{"index":%d,"delta":' % index, b',"logprobs":null,"finish_reason":null}'
    said = choice.message

    def spoken(delta: dict[str, Any], text: str) -> bytes:
        if dealer is None:
            return head + orjson.dumps(delta) + plain
        shown = {"content": logprobs_of(dealer.take(text)), "refusal": None}
        return b'%s%s,"logprobs":%s,"finish_reason":null}' % (head, orjson.dumps(delta), orjson.dumps(shown))

    first = {"role": "assistant", "content": None if content_of(said) is None else "", "refusal": None}
    yield head + orjson.dumps(first) + plain
    for key in ("reasoning_content", "content"):
        for piece in pieces(said.get(key) or ""):
            yield spoken({key: piece}, piece)
    for delta in _call_deltas(call, choice):
        yield head + orjson.dumps(delta) + plain
    left = {"content": logprobs_of(dealer.rest()), "refusal": None} if dealer is not None else None
    yield b'%s{},"logprobs":%s,"finish_reason":%s}' % (head, orjson.dumps(left), orjson.dumps(_finish(call, choice)))


def _call_deltas(call: ModelCall, choice: Choice) -> Iterator[dict[str, Any]]:
    """Each call's name, then its arguments in pieces."""
    if "functions" in call.extra:
        function = legacy.call_of(choice.message)
        if function is not None:
            yield {"function_call": {"name": function["name"], "arguments": ""}}
            for piece in pieces(function["arguments"]):
                yield {"function_call": {"arguments": piece}}
        return
    for at, made in enumerate(choice.message.get("tool_calls") or ()):
        function = made["function"]
        opening = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": at, "id": made["id"], "type": "function", "function": opening}]}
        for piece in pieces(function["arguments"]):
            yield {"tool_calls": [{"index": at, "function": {"arguments": piece}}]}
