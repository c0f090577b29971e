"""OpenAI's Responses API on the wire: requests in. Pure; nothing waits. `response_out` writes the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from palestra.server.gateway.dialects import items, response_out
from palestra.server.gateway.dialects.asking import (
    Count,
    Objects,
    Sampled,
    StopText,
    StopTexts,
    Top,
    choose_tools,
    sampling_of,
    schema_of,
    stops_of,
    thinking_of,
)
from palestra.server.gateway.dialects.reading import decode, encode, must_echo
from palestra.server.gateway.dialects.shapes import OpenAIErrors
from palestra.server.gateway.dialects.sse import event
from palestra.server.gateway.types import ModelCall, ModelReply, Recall
from palestra.server.types import ServerError, SessionError


class TextWish(msgspec.Struct):
    """`text`: the form of the reply's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningWish(msgspec.Struct):
    """`reasoning`: how hard the model thinks."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Sampled, kw_only=True):
    """What of `/v1/responses` is understood; other fields are accepted and have no effect."""

    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextWish | None = None
    reasoning: ReasoningWish | None = None
    max_output_tokens: Count | None = None
    stop: StopText | StopTexts | None = None
    top_logprobs: Top | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    user: str | None = None


_decode = msgspec.json.Decoder(ResponsesRequest).decode


class ResponsesDialect(OpenAIErrors):
    """`/v1/responses`."""

    name = "responses"

    def read(self, body: bytes, recall: Recall) -> ModelCall:
        """A checked call, the messages of `previous_response_id` before its own. See `Dialect.read`."""
        asked = decode(_decode, body)
        _refuse(asked)
        if asked.input == []:
            raise SessionError("input is empty")
        earlier = recall(asked.previous_response_id) if asked.previous_response_id else ()
        messages = items.messages_of(asked.input, earlier, asked.instructions)
        choice, tools = choose_tools(asked.tool_choice, items.tools_of(asked.tools or ()))
        effort = asked.reasoning.effort if asked.reasoning is not None else None
        thinking, level = thinking_of(asked.chat_template_kwargs, effort, "reasoning.effort")
        wanted = asked.text.format if asked.text is not None else None
        return ModelCall(
            messages=encode(messages),
            tools=encode(tools) if tools else b"",
            model=asked.model or "",
            stream=bool(asked.stream),
            max_tokens=asked.max_output_tokens,
            stop=stops_of(asked.stop),
            sampling=sampling_of(asked),
            logprobs=bool(asked.top_logprobs) or "message.output_text.logprobs" in (asked.include or ()),
            top_logprobs=asked.top_logprobs or 0,
            response_schema=schema_of(wanted, "text.format", nested=False),
            tool_choice=choice if tools else None,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            thinking=thinking,
            effort=level,
            forced_ids=tuple(asked.forced_ids or ()),
            extra=must_echo(_echoed(asked), "tools, tool_choice or text"),
        )

    def reply(self, call: ModelCall, reply: ModelReply) -> dict[str, Any]:
        """A `response` object, finished."""
        return response_out.finished(call, reply, response_out.output_of(call, reply))

    def events(self, call: ModelCall, reply: ModelReply) -> Iterator[bytes]:
        """`response.created` to `response.completed` (or `.incomplete`), numbered from 0."""
        for number, (name, body) in enumerate(response_out.events_of(call, reply)):
            yield event({"type": name, "sequence_number": number, **body}, name)

    def error_event(self, error: ServerError, status: int) -> bytes:
        """An `error` event. It is the stream's first, since a reply is whole before its stream begins; its `error` field is what makes the
        official client raise."""
        inner = self.error(error, status)["error"]
        flat = {"code": inner["code"], "message": inner["message"], "param": None}
        return event({"type": "error", "sequence_number": 0, **flat, "error": inner}, "error")


def _refuse(asked: ResponsesRequest) -> None:
    refused = {
        "conversation": asked.conversation is not None,
        "prompt": asked.prompt is not None,
        "background": bool(asked.background),
    }
    for name, given in refused.items():
        if given:
            raise SessionError(f"{name}: nothing of this is kept here; send the input whole, or previous_response_id")


def _echoed(asked: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that its response repeats."""
    wanted = asked.text.format if asked.text is not None else None
    reasoning = asked.reasoning or ReasoningWish()
    return {
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "store": asked.store is not False,
        "temperature": asked.temperature,
        "text": {"format": wanted or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
