"""The service's HTTP application and its process loop.

In: a `RolloutService` and listening sockets: one, or a second one for the control routes. Out: answers on them; `on_ready` is called once
it takes calls. It waits for SIGTERM or SIGINT, then closes the store in order.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import resource
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from palestra.server import control_bodies
from palestra.server.gateway.dialects.chat import ChatDialect
from palestra.server.gateway.dialects.completions import CompletionsDialect
from palestra.server.gateway.dialects.messages import MessagesDialect
from palestra.server.gateway.dialects.responses import ResponsesDialect
from palestra.server.gateway.endpoint import Gone, ModelEndpoint
from palestra.server.gateway.openapi import describe
from palestra.server.gateway.types import Dialect
from palestra.server.listen import LOOPBACK
from palestra.server.publish_routes import publishing
from palestra.server.publishing.bodies import BODIES as PUBLISH_BODIES
from palestra.server.ready import ReadyServer, config_of
from palestra.server.routes import control, models, on_error, on_gone, on_http_error
from palestra.server.service import RolloutService
from palestra.server.session_routes import BODIES, sessions
from palestra.server.types import ServerError

DIALECTS: dict[str, Callable[[], Dialect]] = {
    "/v1/chat/completions": ChatDialect,
    "/v1/completions": CompletionsDialect,
    "/v1/responses": ResponsesDialect,
    "/v1/messages": MessagesDialect,
}
"""Model routes: at the root, and below /sessions/NAME."""


class ServiceApp(FastAPI):
    """FastAPI, with a short way to the model routes: its stack of middlewares and its router cost a quarter of a millisecond a call."""

    def __init__(self, lifespan: Any) -> None:
        super().__init__(title="Palestra rollout service", lifespan=lifespan, docs_url=None, redoc_url=None)
        self.hot: dict[str, ModelEndpoint] = {}
        """Model routes by their path below a session's."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path, part = scope["path"], None
            if path.startswith("/sessions/"):
                part, _, path = path[len("/sessions/") :].partition("/")
                path = f"/{path}"
            if (endpoint := self.hot.get(path)) is not None and part != "":
                if part is not None:
                    scope["path_params"] = {"part": part}
                return await endpoint(scope, receive, send)
        return await super().__call__(scope, receive, send)


def build_app(service: RolloutService, admin_token: str, *, control_here: bool = True) -> ServiceApp:
    """The application that agents talk to, and whose lifespan is the service's. Model routes are plain ASGI (they are the hot ones).

    `control_here`: whether the control routes, which are FastAPI's, are in it too, or only in `control_app`'s.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        # The start's objects live as long as the process: keep the collector from walking them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        yield
        await service.close()

    app = _app(service, admin_token, lifespan)
    for path, dialect in DIALECTS.items():
        endpoint = app.hot[path] = ModelEndpoint(dialect(), service.sessions, service.calls, service.core)
        for prefix in ("", "/sessions/{part}"):
            app.router.routes.append(Route(f"{prefix}{path}", endpoint, methods=["POST"]))
    for prefix in ("", "/sessions/{part}"):
        app.add_route(f"{prefix}/v1/models", models, methods=["GET"])
    if control_here:
        _add_control(app)
    return app


def control_app(service: RolloutService, admin_token: str) -> ServiceApp:
    """The control routes alone, for an address that agents cannot reach."""
    app = _app(service, admin_token, None)
    _add_control(app)
    return app


def _app(service: RolloutService, admin_token: str, lifespan: Any) -> ServiceApp:
    app = ServiceApp(lifespan)
    app.state.service, app.state.admin_token = service, admin_token
    app.openapi = functools.cache(lambda: describe(app, {**control_bodies.BODIES, **PUBLISH_BODIES, **BODIES}))  # type: ignore[method-assign]
    app.add_exception_handler(ServerError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    for gone in (Gone, ClientDisconnect):  # ours, and the framework's own
        app.add_exception_handler(gone, on_gone)
    app.add_exception_handler(Exception, on_error)
    return app


def _add_control(app: FastAPI) -> None:
    app.include_router(control)
    app.include_router(publishing)
    app.include_router(sessions)


def raise_file_limit() -> None:
    """Two descriptors a session: take all that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Doors:
    """One ASGI application in front of several, each of which answers on its own listener. The first one's lifespan is everybody's."""

    def __init__(self, listeners: Sequence[tuple[FastAPI, socket.socket]]) -> None:
        self._first = listeners[0][0]
        self._by_address = {sock.getsockname()[:2]: app for app, sock in listeners}
        # The local address of a connection to a wildcard listener is another one than the listener's; its port is not.
        self._by_port = {sock.getsockname()[1]: app for app, sock in listeners if sock.getsockname()[0] in LOOPBACK}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            return await self._first(scope, receive, send)
        address = tuple(scope["server"])
        app = self._by_address.get(address) or self._by_port[address[1]]
        return await app(scope, receive, send)


def serve(listeners: Sequence[tuple[FastAPI, socket.socket]], on_ready: Callable[[], None]) -> bool:
    """Serves every application on its listener, in one loop, until a signal ends them together; the first one's lifespan spans them all.
    False where it did not start (the cause is in the log)."""
    raise_file_limit()
    config = config_of(listeners[0][0] if len(listeners) == 1 else Doors(listeners), grace_s=5)
    server = ReadyServer(config, on_ready)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[sock for _, sock in listeners]))
    return server.started
