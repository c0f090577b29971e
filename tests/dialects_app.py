"""A service in one page for the dialects' tests: the four model routes on real dialects, with a canned answer behind them, and the official
clients pointed at it in this very process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import httpx2
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from palestra.server.gateway.dialects.chat import ChatDialect
from palestra.server.gateway.dialects.completions import CompletionsDialect
from palestra.server.gateway.dialects.messages import MessagesDialect
from palestra.server.gateway.dialects.responses import ResponsesDialect
from palestra.server.gateway.types import (
    Choice,
    Dialect,
    Message,
    ModelCall,
    ModelReply,
    TokenLogprob,
    Usage,
    status_of,
)
from palestra.server.types import ServerError, SessionError

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": CompletionsDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
}
USAGE = Usage(prompt=100, completion=20, cached=64, reasoning=7)


def nothing_recalled(reply_id: str) -> Sequence[Message]:
    raise SessionError(f"no reply {reply_id}", 404, "not_found")


def tokens_of(text: str) -> tuple[TokenLogprob, ...]:
    """One token per three characters."""
    parts = [text[i : i + 3] for i in range(0, len(text), 3)]
    return tuple(
        TokenLogprob(part, part.encode(), -0.5 * at, ((part, -0.5 * at), ("other", -3.0)))
        for at, part in enumerate(parts)
    )


def say(content: str = "", **more: Any) -> Choice:
    """A choice with this content; `calls` are (id, name, arguments), `reasoning` its reasoning, the rest the choice's own fields."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning := more.pop("reasoning", ""):
        message["reasoning_content"] = reasoning
    if calls := more.pop("calls", ()):
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    default = "tool_calls" if calls else "stop"
    fields = {"text": content, "finish_reason": default, "tokens": tokens_of(content), **more}
    return Choice(message, **fields)


def replied(*choices: Choice) -> ModelReply:
    return ModelReply("r7-3", "policy", 1_700_000_000, choices, USAGE)


class Service:
    """Answers every call with `reply`, or raises it where it is an error; `late` errors come when the stream has begun. Keeps the calls."""

    def __init__(self, reply: ModelReply | ServerError | None = None, *, late: bool = False) -> None:
        self.reply, self.late = reply, late
        self.calls: list[ModelCall] = []
        self.recalled: dict[str, list[Message]] = {}
        routes = [Route(path, self._route(dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
        self.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(Starlette(routes=routes)), base_url="http://test")
        self.openai = openai.AsyncOpenAI(api_key="key", base_url="http://test/v1", http_client=self.http, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(
            api_key="key", base_url="http://test", http_client=self.http, max_retries=0
        )

    @property
    def call(self) -> ModelCall:
        """The last call."""
        return self.calls[-1]

    def recall(self, reply_id: str) -> Sequence[Message]:
        try:
            return self.recalled[reply_id]
        except KeyError:
            return nothing_recalled(reply_id)

    def _route(self, dialect: Dialect) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                call = dialect.read(await request.body(), self.recall)
                self.calls.append(call)
                if isinstance(self.reply, ServerError) and not (self.late and call.stream):
                    raise self.reply
            except ServerError as error:
                status, _ = status_of(error)
                return JSONResponse(dialect.error(error, status), status)
            if call.stream:
                return StreamingResponse(self._events(dialect, call), media_type="text/event-stream")
            assert isinstance(self.reply, ModelReply)
            return JSONResponse(dict(dialect.reply(call, self.reply)))

        return answer

    def _events(self, dialect: Dialect, call: ModelCall) -> Iterator[bytes]:
        yield dialect.ping
        if isinstance(self.reply, ServerError):
            yield dialect.error_event(self.reply, status_of(self.reply)[0])
            return
        assert self.reply is not None
        yield from dialect.events(call, self.reply)
