"""Sessions in front of a plain model URL, for agents that play by themselves: what they say and are told is kept, so that it can be scored.

A listener on loopback gives every episode a URL and a key of its own; chat completions go on to the real URL, under the real key and
model name. A `SessionHost`. What an agent does not say of sampling is filled in from the evaluation; what it says is honoured. It waits
for the model, and for nothing else. Streams are replayed: a streamed reply is the finished one in pieces.

Of the API dialects it speaks OpenAI's chat completions only; the others need a rollout service (`palestra serve`).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from palestra.agents.evaluation.calls import BUSY, RETRIES, Meter, wait_s
from palestra.agents.transcript import text_of
from palestra.agents.types import AgentError, GroupAssignment, SessionHandle
from palestra.envs.types import Episode, Message

START_S = 10.0
BODY_BYTES = 64 << 20
"""Largest request and reply."""
PIECE = 64
"""Characters of one piece of a stream."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The model behind the relay."""

    base_url: str
    """OpenAI base URL, ending in /v1."""
    api_key: str
    defaults: Mapping[str, Any]
    """Fields of a request that an agent may give otherwise; `model` is always the evaluation's."""
    max_turns: int
    timeout_s: float
    """Of one model call, seconds."""


@dataclass(slots=True)
class _Session:
    """One episode's side of the relay."""

    rollout_id: str
    defaults: Mapping[str, Any]
    turns: int = 0
    closed: bool = False
    branches: list[list[Message]] = field(default_factory=list)

    def keep(self, asked: Sequence[Message], reply: Message) -> None:
        """A turn: it extends the branch that the request repeats, or begins one."""
        signs = [_sign(message) for message in asked]
        for branch in self.branches:
            if [_sign(message) for message in branch] == signs[: len(branch)]:
                branch += [*asked[len(branch) :], reply]
                return
        self.branches.append([*asked, reply])


def _sign(message: Message) -> tuple[Any, ...]:
    """What tells a message from others, however a client writes it."""
    calls = tuple(call.get("id") for call in message.get("tool_calls") or ())
    return (message.get("role"), text_of(message), calls, message.get("tool_call_id"))


class Relay:
    """Serves sessions while the context is open. Thread-safe."""

    def __init__(
        self, upstream: Upstream, meter: Meter, own: Callable[[str, int], Mapping[str, Any]] = lambda task, k: {}
    ) -> None:
        """`own`: defaults of one episode's requests, by its task and number, over those of all."""
        self._upstream, self._meter, self._own = upstream, meter, own
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # A loop of its own: async agents run on the process's loop, and one that blocks there must not hold up its own model.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="eval-relay")
        self.url = ""
        """Base URL of the listener, without /v1."""

    def __enter__(self) -> Relay:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)
        except OSError as error:
            raise AgentError(f"the relay cannot listen on loopback: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        for prefix in ("/v1", "/sessions/{key}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_route("*", "/{rest:.*}", _nothing_here)
        # A model may think for minutes; the call's own timeout bounds it.
        timeout = aiohttp.ClientTimeout(total=self._upstream.timeout_s, connect=30.0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._http.close()

    # A SessionHost's side.

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`."""
        key, rollout_id = f"sk-{secrets.token_urlsafe(24)}", f"{assignment.group_id}-{index}"
        defaults = {**self._upstream.defaults, **self._own(assignment.group_id, index)}
        with self._lock:
            self._sessions[key] = _Session(rollout_id, defaults)
        return SessionHandle(rollout_id, assignment.attempt, f"{self.url}/v1", key, f"{self.url}/sessions/{key}/v1")

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """See `SessionHost`. Its conversation is forgotten: the episode holds it."""
        with self._lock:
            session = self._sessions.get(handle.api_key)
            if session is not None:
                session.closed, session.branches = True, []

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `SessionHost`."""
        with self._lock:
            session = self._sessions.get(handle.api_key)
            return [list(branch) for branch in session.branches] if session is not None else []

    # The listener's side.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session is None:
            return _failure(401, "unknown_session", "this key opens no session of the evaluation")
        if session.closed:
            return _failure(409, "session_closed", "the episode has ended")
        try:
            asked = orjson.loads(await request.read())
            messages = list(asked["messages"])
            if not all(isinstance(message, dict) for message in messages) or asked.get("n", 1) not in (1, None):
                raise ValueError("messages must be objects, and n must be 1")
        except (ValueError, LookupError, TypeError) as error:
            return _failure(400, "invalid_request", f"the request is no chat completion: {error}")
        if session.turns >= self._upstream.max_turns:
            said = f"the episode's {self._upstream.max_turns} turns are spent"
            return _failure(400, "budget_exceeded", said, "max_turns")
        session.turns += 1
        status, body = await self._ask(session, _filled(asked, session.defaults))
        if status != 200:
            session.turns -= 1
            return web.Response(body=body, status=status, content_type="application/json")
        try:
            reply = orjson.loads(body)
            message = {"role": "assistant", **reply["choices"][0]["message"]}
        except (ValueError, LookupError, TypeError) as error:
            return _failure(502, "bad_reply", f"the model's server sent no chat completion: {error}")
        self._count(session, messages, message, reply)
        if asked.get("stream"):
            return await _replay(request, reply, message)
        return web.Response(body=body, content_type="application/json")

    def _count(self, session: _Session, asked: list[Message], message: Message, reply: Mapping[str, Any]) -> None:
        usage = reply.get("usage")
        self._meter.usage(session.rollout_id, usage if isinstance(usage, Mapping) else {})
        with self._lock:
            if not session.closed:
                session.keep(asked, {key: value for key, value in message.items() if value is not None})

    async def _ask(self, session: _Session, fields: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of the model's server; sent again while it is busy or cannot be reached."""
        url = f"{self._upstream.base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {self._upstream.api_key}", "Content-Type": "application/json"}
        data, attempt = orjson.dumps(fields), 0
        while True:
            began = self._loop.time()
            try:
                async with self._http.post(url, data=data, headers=headers) as answer:
                    status, body, asked = answer.status, await answer.read(), answer.headers.get("Retry-After")
            except (aiohttp.ClientError, TimeoutError) as error:
                said = f"{url}: {type(error).__name__}: {error}"
                status, body, asked = 502, _error_body("unreachable", said, None), None
            if status == 200:
                self._meter.took(session.rollout_id, self._loop.time() - began)
            if status not in BUSY or attempt >= RETRIES or session.closed:
                return status, body
            self._meter.retried(session.rollout_id)
            await asyncio.sleep(wait_s(attempt, asked))
            attempt += 1

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": self._upstream.defaults["model"], "object": "model", "created": 0, "owned_by": "palestra"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> _Session | None:
        key = request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        with self._lock:
            return self._sessions.get(key)


def _filled(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The request as it goes on: under the evaluation's model, with what it leaves open, and without a stream."""
    fields = {**defaults, **{key: value for key, value in asked.items() if value is not None}}
    if asked.get("max_completion_tokens") is not None:
        fields.pop("max_tokens", None)
    for dropped in ("stream", "stream_options"):
        fields.pop(dropped, None)
    return {**fields, "model": defaults["model"]}


def _error_body(code: str, message: str, param: str | None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "palestra_eval", "code": code, "param": param}})


def _failure(status: int, code: str, message: str, param: str | None = None) -> web.Response:
    return web.Response(body=_error_body(code, message, param), status=status, content_type="application/json")


async def _nothing_here(request: web.Request) -> web.StreamResponse:
    said = (
        f"{request.method} {request.path}: an evaluation of a plain URL relays /v1/chat/completions only; "
        "for other dialects evaluate against `palestra serve`"
    )
    return _failure(404, "not_found", said)


async def _replay(request: web.Request, reply: Mapping[str, Any], message: Message) -> web.StreamResponse:
    """A finished reply as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    head = {key: reply.get(key) for key in ("id", "created", "model")}
    reason = reply["choices"][0].get("finish_reason")
    for delta, finish in [*((delta, None) for delta in _deltas(message)), ({}, reason)]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    text = text_of(message)
    for at in range(0, len(text), PIECE):
        yield {"content": text[at : at + PIECE]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": index, **call}]}
