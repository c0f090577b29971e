"""The chat policy: answers a conversation through an OpenAI-compatible URL, on the official `openai` client with its
aiohttp transport.

Messages go out, one assistant message comes back. It waits for the service, at most until the deadline that `act` is
given. All policies of a process share one client, on the process's loop thread.

The client is used through `post` with a body of our own making: building and validating typed objects costs three times
the call itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import httpx2
import openai
import orjson

from palestra.agents.stops import stop_of
from palestra.agents.types import AgentError, PolicyReply, PolicyStop, SamplingParams, SessionHandle
from palestra.envs import background
from palestra.envs.clients import SharedClient
from palestra.envs.types import Message, StopReason, ToolSpec

RETRY_DELAYS_S = (0.1, 0.5, 2.0)
"""Waits before a call is sent again after its connection failed; the same X-Request-Id tells the service that it is the
same call.
"""

_CLIENT = SharedClient(trust_env=False)
"""All policies'. The service is reached directly, never through a proxy."""


class ModelStatusError(AgentError):
    """The model's server answered with an HTTP error that ends no conversation. `retry_after`: its header, if it sent one."""

    def __init__(self, message: str, status: int, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class ChatPolicy:
    """Plays one session."""

    def __init__(
        self,
        handle: SessionHandle,
        sampling: SamplingParams,
        *,
        model: str = "policy",
        request_timeout_s: float = 300.0,
        params: Mapping[str, Any] | None = None,
        on_usage: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`params`: further fields of every request; None takes a field out. `on_usage` is given the `usage` of each reply ({} without)."""
        self._url = f"{handle.base_url.rstrip('/')}/chat/completions"
        self._key = handle.api_key
        self._request_timeout_s = request_timeout_s
        self._fixed: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.seed is not None:
            self._fixed["seed"] = sampling.seed
        if params:
            self._fixed = {key: value for key, value in {**self._fixed, **params}.items() if value is not None}
        self._on_usage = on_usage

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        """The next assistant message. See `Policy.act`; `timeout_s` is what the episode has left."""
        request: dict[str, Any] = {**self._fixed, "messages": list(messages)}
        if tools:
            request["tools"] = list(tools)
        try:
            body = orjson.dumps(request)
        except TypeError as error:
            raise AgentError(f"the conversation cannot be written as JSON: {error}") from error
        limit = min(timeout_s, self._request_timeout_s)
        try:
            content = background.call(self._post(body), limit)
        except background.DeadlineError:
            if timeout_s <= self._request_timeout_s:
                raise PolicyStop(StopReason.DEADLINE, f"no reply in the {timeout_s:.1f} s that were left") from None
            raise AgentError(f"{self._url}: no reply after {limit:g} s") from None
        except openai.APIStatusError as error:
            _raise_status(error)
        except openai.OpenAIError as error:
            raise AgentError(f"{self._url}: {type(error).__name__}: {error.__cause__ or error}") from error
        return _read_reply(content, self._url, self._on_usage)

    async def _post(self, body: bytes) -> bytes:
        headers = {
            "Authorization": f"Bearer {self._key}",
            "Content-Type": "application/json",
            "X-Request-Id": uuid.uuid4().hex,
        }
        for delay in (*RETRY_DELAYS_S, None):
            try:
                response = await _CLIENT.get().post(
                    self._url, cast_to=httpx2.Response, content=body, options={"headers": headers}
                )
            except openai.APIConnectionError:
                if delay is None:
                    raise
                await asyncio.sleep(delay)
            else:
                return response.content
        raise AssertionError("unreachable: the last attempt returns or raises")


def close_client() -> None:
    """Closes the process's connections; the next call opens new ones."""
    _CLIENT.close()


def _raise_status(error: openai.APIStatusError) -> NoReturn:
    body = error.body if isinstance(error.body, Mapping) else {}
    code = str(body.get("code") or "")
    said = str(body.get("message") or error.message)
    if (stop := stop_of(error.status_code, body, said)) is not None:
        raise stop from None
    text = f"HTTP {error.status_code} {code or 'without a code'}: {said[:500]}"
    raise ModelStatusError(text, error.status_code, error.response.headers.get("retry-after")) from error


def _read_reply(content: bytes, url: str, on_usage: Callable[[Mapping[str, Any]], None] | None = None) -> PolicyReply:
    try:
        reply = orjson.loads(content)
        choice = reply["choices"][0]
        raw, finish_reason = choice["message"], choice["finish_reason"]
        message = {key: value for key, value in raw.items() if value is not None}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AgentError(
            f"{url}: the reply is no chat completion: {type(error).__name__}: {content[:200]!r}"
        ) from error
    if on_usage is not None:
        usage = reply.get("usage")
        on_usage(usage if isinstance(usage, Mapping) else {})
    message["role"] = "assistant"
    message.setdefault("content", "")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    return PolicyReply(message, str(finish_reason))
