"""The environment host's listener.

In: HTTP requests, bounded in size, and handshakes for `/ws`. Out: JSON, text for Prometheus, sessions. It waits for the desk, and for
SIGTERM or SIGINT, upon which all environments are closed.

| route | what |
| --- | --- |
| `/ws` | a session over a WebSocket, as OpenEnv's clients expect it |
| `POST /reset` | `{"session_id"?, "seed"?, "task"?}`: an episode begins, in a new session unless one is named |
| `POST /step` | `{"session_id", "action"}`: an assistant message, or its text |
| `POST /close` | `{"session_id"}`: ends the session |
| `GET /health`, `/metadata`, `/schema` | as OpenEnv's servers have them |
| `GET /metrics` | for Prometheus |
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from palestra.server.env_host import wire
from palestra.server.env_host.desk import EnvDesk
from palestra.server.env_host.guard import Guard
from palestra.server.env_host.types import EXECUTION_ERROR, VALIDATION_ERROR, EnvRefusal
from palestra.server.env_host.upgrade import upgrade_to
from palestra.server.env_host.websocket import MOST_BYTES
from palestra.server.ready import config_of, serve_until_told


def build_app(desk: EnvDesk, guard: Guard) -> Starlette:
    """The application; its lifespan is the desk's."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await desk.start()
        yield
        await desk.close()

    routes = [
        Route("/reset", reset, methods=["POST"]),
        Route("/step", step, methods=["POST"]),
        Route("/close", close, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metadata", metadata, methods=["GET"]),
        Route("/schema", schema, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    handlers: Mapping[Any, Any] = {EnvRefusal: on_refusal, ClientDisconnect: on_gone, Exception: on_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.desk, app.state.guard = desk, guard
    return app


async def reset(request: Request) -> Response:
    """An episode begins."""
    desk, body = _desk(request), await _body(request)
    name = body.pop("session_id", None)
    wire.read_reset(body)  # before a process is started for it
    fresh = name is None
    name = await desk.open_pipe() if name is None else str(name)
    try:
        data = await desk.ask(name, {"type": "reset", "data": body})
    except EnvRefusal:
        if fresh:  # its name is not known to anybody
            await desk.close_session(name)
        raise
    seen = data["observation"]
    return _json(
        {"session_id": name, "observation": seen["messages"], "tools": seen["tools"], "info": data["metadata"]}
    )


async def step(request: Request) -> Response:
    """One assistant message."""
    desk, body = _desk(request), await _body(request)
    if unknown := sorted(body.keys() - {"session_id", "action"}):
        raise wire.invalid(f"unknown key {unknown[0]!r}; known: action, session_id")
    action = body.get("action")
    said = action if isinstance(action, dict) and "role" not in action and "message" in action else {"message": action}
    data = await desk.ask(_named(body), {"type": "step", "data": said})
    info = data["metadata"]
    answer = {
        "observation": data["observation"]["messages"], "reward": data["reward"],
        "terminated": info.pop("terminated"), "truncated": info.pop("truncated"), "info": info,
    }  # fmt: skip
    return _json(answer)


async def close(request: Request) -> Response:
    """Ends a session; answered when its process is gone."""
    await _desk(request).close_session(_named(await _body(request)))
    return _json({"closed": True})


async def health(request: Request) -> Response:
    """That it lives. No token is needed."""
    return _json({"status": "healthy"})


async def metadata(request: Request) -> Response:
    """What is served."""
    about = _desk(request).nursery.about
    said = {
        "name": about.name, "description": about.description or about.name, "version": about.version,
        "readme_content": None, "author": None, "documentation_url": None,
    }  # fmt: skip
    return _json(said)


async def schema(request: Request) -> Response:
    """JSON schemas of what goes in and comes out."""
    return _json(wire.schemas(_desk(request).nursery.about.tools))


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    desk = _desk(request)
    ended = {why: count for why, count in sorted(desk.counts.items()) if why not in ("started", "refused", "steps")}
    values = {
        "sessions": ("gauge", {"": desk.open}),
        "capacity": ("gauge", {"": desk.settings.max_envs}),
        "started_total": ("counter", {"": desk.counts["started"]}),
        "refused_total": ("counter", {"": desk.counts["refused"]}),
        "steps_total": ("counter", {"": desk.steps}),
        "ended_total": ("counter", {f'{{why="{why}"}}': count for why, count in ended.items()}),
    }
    lines = []
    for name, (kind, samples) in values.items():
        lines.append(f"# TYPE palestra_env_{name} {kind}")
        lines += [f"palestra_env_{name}{label} {value}" for label, value in samples.items()]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def on_refusal(request: Request, error: Exception) -> Response:
    """A request that is not done."""
    assert isinstance(error, EnvRefusal), "registered for these alone"
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return _json({"error": {"message": str(error), "code": error.code}}, error.status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """A fault of ours."""
    return _json({"error": {"message": f"{type(error).__name__}: {error}", "code": EXECUTION_ERROR}}, 500)


async def on_gone(request: Request, error: Exception) -> Response:
    """The caller left before its request was whole: nobody reads this."""
    return Response(status_code=499)


def _desk(request: Request) -> EnvDesk:
    """The desk, for those who may use it.

    Raises:
        EnvRefusal: the caller may not.
    """
    guard: Guard = request.app.state.guard
    guard.check(dict(request.headers.raw))
    desk: EnvDesk = request.app.state.desk
    return desk


async def _body(request: Request) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        EnvRefusal: it is none, or too long.
    """
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > MOST_BYTES:
            raise EnvRefusal(f"a body of more than {MOST_BYTES} bytes", 413, VALIDATION_ERROR)
    value = wire.read_json(bytes(found) or b"{}")
    if not isinstance(value, dict):
        raise wire.invalid("a request's body is a JSON object")
    return value


def _named(body: Mapping[str, Any]) -> str:
    name = body.get("session_id")
    if not isinstance(name, str):
        raise wire.invalid("'session_id' is missing: /reset gives it")
    return name


def _json(said: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(said), status, dict(headers or {}), "application/json")


async def serve(app: Starlette, sock: socket.socket, on_ready: Callable[[], None]) -> bool:
    """Serves until SIGTERM or SIGINT; `on_ready` is called once it answers. False where it did not start (the cause is in the log)."""
    desk: EnvDesk = app.state.desk
    config = config_of(app, grace_s=10)
    config.ws = upgrade_to(desk, app.state.guard)
    return await serve_until_told(config, sock, on_ready, desk.close)
