"""The sandbox host's listener.

In: HTTP requests as `sandbox.wire` says, bounded in size. Out: frames, JSON for people, text for Prometheus. It waits for the desk, and for
SIGTERM or SIGINT, upon which all boxes are destroyed and whoever waits is told.
"""

from __future__ import annotations

import hmac
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from palestra.sandbox.inside.frames import HEAD, MAX_FRAME, FrameError, pack
from palestra.sandbox.types import Backend
from palestra.sandbox.wire import (
    CONTENT_TYPE,
    KEY,
    ROOM,
    STATE,
    TIMEOUT,
    WAIT,
    enforced_to_json,
    read_frame,
    spec_from_message,
)
from palestra.server.ready import config_of, serve_until_told
from palestra.server.sandbox_host.desk import BoxDesk
from palestra.server.sandbox_host.types import HostRefusal

MOST_BODY = HEAD.size + MAX_FRAME
MOST_WAIT_S = 60.0
"""Longest wait of a request for a box, seconds."""
USUAL_S = 30.0
"""What an agent may take for a request that runs no code, where its sender did not say."""
STATUSES: Mapping[str, int] = {"box_lost": 410, "protocol": 410, "refused": 400}
"""HTTP status of a reply's code."""


def build_app(desk: BoxDesk, backend: Backend, token: str | None) -> Starlette:
    """The application; its lifespan is the desk's. `token`: what callers must bear; None: nothing."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await desk.start()
        yield
        await desk.close()

    routes = [
        Route("/boxes", create, methods=["POST"]),
        Route("/boxes", boxes, methods=["GET"]),
        Route("/boxes/{box}", ask, methods=["POST"]),
        Route("/boxes/{box}", destroy, methods=["DELETE"]),
        Route("/alive", alive, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={HostRefusal: on_refusal, ClientDisconnect: on_gone, Exception: on_error},
    )
    app.state.desk, app.state.backend, app.state.token = desk, backend, token
    return app


async def create(request: Request) -> Response:
    """A box for a client."""
    desk = _desk(request)
    try:
        spec = spec_from_message(read_frame(await _body(request)))
    except ValueError as error:
        raise HostRefusal(str(error), 400, "invalid_request") from None
    wait_s = _seconds(request, WAIT, 0.0, MOST_WAIT_S)
    lease = await desk.open(request.headers.get(KEY) or secrets.token_hex(16), spec, wait_s)
    return _frame(desk, pack({"box": lease.id, "host": desk.instance}))


async def ask(request: Request) -> Response:
    """An agent's request; answered when the agent answers, or with 202 after a while."""
    desk = _desk(request)
    number = request.headers.get(KEY)
    if number is not None and not (number.isdecimal() and len(number) < 18):
        raise HostRefusal(f"{KEY} {number[:40]!r}; a box wants whole numbers that grow", 400, "invalid_request")
    timeout_s = _seconds(request, TIMEOUT, USUAL_S, math.inf)
    said = await desk.call(
        request.path_params["box"], None if number is None else int(number), await _body(request), timeout_s
    )
    if isinstance(said, str):
        return Response(status_code=202, headers={STATE: said})
    if said.code:
        return _error(STATUSES[said.code], said.code, said.body.decode("utf-8", "replace"))
    return _frame(desk, said.body, {STATE: "lost"} if said.lost else {})


async def destroy(request: Request) -> Response:
    """Ends a box; answered when it is gone."""
    desk = _desk(request)
    await desk.end(request.path_params["box"])
    return Response(status_code=204, headers={ROOM: str(desk.room)})


async def alive(request: Request) -> Response:
    """A client wants its boxes still."""
    desk = _desk(request)
    try:
        names = [str(name) for name in read_frame(await _body(request))["boxes"]]
    except (FrameError, KeyError, TypeError) as error:
        raise HostRefusal(f"wanted {{boxes: [...]}}: {error}", 400, "invalid_request") from None
    return _frame(desk, pack({"gone": list(desk.alive(names))}))


async def boxes(request: Request) -> Response:
    """Which boxes are lent, for people."""
    return _json({"boxes": _desk(request).leases()})


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return PlainTextResponse(_desk(request).metrics(), media_type="text/plain; version=0.0.4")


async def health(request: Request) -> Response:
    """That it lives, and what it holds. No token is needed."""
    desk: BoxDesk = request.app.state.desk
    backend: Backend = request.app.state.backend
    said = {
        "status": "ok", "host": desk.instance, "backend": backend.name, "enforced": enforced_to_json(backend.enforced()),
        "boxes": desk.settings.boxes, "room": desk.room, "lease_s": desk.settings.lease_s,
    }  # fmt: skip
    return _json(said)


async def on_refusal(request: Request, error: Exception) -> Response:
    """A request that is not done."""
    assert isinstance(error, HostRefusal), "registered for these alone"
    desk: BoxDesk = request.app.state.desk
    headers = {ROOM: str(desk.room)}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return _error(error.status, error.code, str(error), headers)


async def on_error(request: Request, error: Exception) -> Response:
    """A fault of ours."""
    return _error(500, "internal", f"{type(error).__name__}: {error}")


async def on_gone(request: Request, error: Exception) -> Response:
    """The caller left before its request was whole: nobody reads this."""
    return Response(status_code=499)


def _desk(request: Request) -> BoxDesk:
    """The desk, for those who bear the token.

    Raises:
        HostRefusal: the caller does not.
    """
    token: str | None = request.app.state.token
    if token is not None:
        said = request.headers.get("Authorization", "").encode("latin-1")
        if not hmac.compare_digest(said, f"Bearer {token}".encode()):
            raise HostRefusal("a token is needed: Authorization: Bearer TOKEN", 401, "unauthorized")
    desk: BoxDesk = request.app.state.desk
    return desk


async def _body(request: Request) -> bytes:
    """The body, which must be a frame's kind and no longer than one.

    Raises:
        HostRefusal: it is not.
    """
    if request.headers.get("Content-Type") != CONTENT_TYPE:
        raise HostRefusal(f"Content-Type must be {CONTENT_TYPE}", 415, "invalid_request")
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > MOST_BODY:
            raise HostRefusal(f"a body of more than {MOST_BODY} bytes", 413, "too_large")
    return bytes(found)


def _seconds(request: Request, name: str, usual: float, most: float) -> float:
    try:
        seconds = float(request.headers.get(name, usual))
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise HostRefusal(f"{name} must be a number of seconds", 400, "invalid_request")
    return min(seconds, most)


def _frame(desk: BoxDesk, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, 200, {**(headers or {}), ROOM: str(desk.room)}, CONTENT_TYPE)


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": {"message": message, "code": code}}, status, headers)


def _json(said: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(said), status, dict(headers or {}), "application/json")


async def serve(app: Starlette, sock: socket.socket, on_ready: Callable[[], None]) -> bool:
    """Serves until SIGTERM or SIGINT; `on_ready` is called once it answers. False where it did not start (the cause is in the log)."""
    desk: BoxDesk = app.state.desk
    return await serve_until_told(config_of(app, grace_s=10), sock, on_ready, desk.close)
