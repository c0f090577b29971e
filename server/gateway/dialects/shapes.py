"""What the answers of OpenAI's APIs share: errors, usage, logprobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palestra.server.gateway.dialects.sse import COMMENT_PING, DONE, event
from palestra.server.gateway.types import TokenLogprob, Usage, status_of
from palestra.server.types import ServerError

FLOOR = -9999.0
"""What OpenAI's API reports for a token whose logprob is no finite number, which JSON cannot say."""


def finite(logprob: float) -> float:
    """A logprob that JSON can say."""
    return logprob if logprob > FLOOR else FLOOR


class OpenAIErrors:
    """Errors and pings as OpenAI's clients read them."""

    ping: ClassVar[bytes] = COMMENT_PING

    def error(self, error: ServerError, status: int) -> dict[str, Any]:
        """An error's body."""
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        return {"error": {"message": str(error), "type": kind, "code": status_of(error)[1], "param": None}}

    def error_event(self, error: ServerError, status: int) -> bytes:
        """An error in the middle of a stream, and the stream's end."""
        return event(self.error(error, status)) + DONE


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts of chat and completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprobs_of(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens with their logprobs and their likeliest alternatives, as chat and Responses list them."""
    return [
        {
            "token": token.text,
            "logprob": finite(token.logprob),
            "bytes": list(token.raw or token.text.encode()),
            "top_logprobs": [
                {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())} for text, logprob in token.top
            ],
        }
        for token in tokens
    ]


def content_of(message: Mapping[str, Any]) -> str | None:
    """A reply's text; null where it only calls tools."""
    text: str | None = message.get("content")
    return text or (None if message.get("tool_calls") else "")
