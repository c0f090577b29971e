"""The OpenAI chat dialect on the wire: requests checked, replies and errors built. Pure; nothing waits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from palestra.server.types import SessionError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
FINISH = {"stop": "stop", "length": "length", "abort": "length"}


class ChatRequest(msgspec.Struct):
    """What of `/v1/chat/completions` is understood; other fields are accepted and have no effect on the tokens."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    stop: Any = None
    response_format: dict[str, Any] | None = None
    forced_ids: list[int] | None = None


_decode = msgspec.json.Decoder(ChatRequest).decode


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply."""

    prompt: int
    completion: int
    cached: int


def read_chat(body: bytes) -> ChatRequest:
    """A checked request.

    Raises:
        SessionError: 400 with what is wrong; fields that would change the distribution are refused, never ignored.
    """
    try:
        request = _decode(body)
    except msgspec.DecodeError as error:
        raise SessionError(f"request body: {error}") from None
    if not request.messages:
        raise SessionError("messages is empty")
    for at, message in enumerate(request.messages):
        if message.get("role") not in ROLES:
            raise SessionError(f"messages[{at}].role is {message.get('role')!r}; known: {', '.join(sorted(ROLES))}")
        for call in message.get("tool_calls") or ():
            if (
                not isinstance(call, dict)
                or not isinstance(call.get("function"), dict)
                or "name" not in call["function"]
            ):
                raise SessionError(f"messages[{at}].tool_calls: every call needs a function with a name")
    refused = {
        "stream": bool(request.stream),
        "n": request.n not in (None, 1),
        "stop": bool(request.stop),
        "response_format": bool(request.response_format) and (request.response_format or {}).get("type") != "text",
    }
    if named := [name for name, asked in refused.items() if asked]:
        raise SessionError(f"not built: {', '.join(named)} on this service", code="not_built")
    return request


def chat_reply(
    *,
    reply_id: str,
    model: str,
    message: Mapping[str, Any],
    finish_reason: str,
    usage: Usage,
    logprobs: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """A `chat.completion` object."""
    reason = "tool_calls" if message.get("tool_calls") and finish_reason == "stop" else FINISH[finish_reason]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    if logprobs is not None:
        choice["logprobs"] = {"content": list(logprobs), "refusal": None}
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        },
    }


def error_body(message: str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}
