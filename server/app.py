"""The service's HTTP application and its process loop.

In: a `RolloutService`, a host and a port. Out: a listener; `on_ready` is called with its URL once it takes calls. It waits for SIGTERM or
SIGINT, then closes the store in order.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from palestra.server.gateway.dialects.chat import ChatDialect
from palestra.server.gateway.dialects.completions import CompletionsDialect
from palestra.server.gateway.dialects.messages import MessagesDialect
from palestra.server.gateway.dialects.responses import ResponsesDialect
from palestra.server.gateway.endpoint import ModelEndpoint
from palestra.server.gateway.types import Dialect
from palestra.server.routes import control, models, on_error, on_http_error
from palestra.server.service import RolloutService
from palestra.server.session_routes import sessions
from palestra.server.types import ServerError

DIALECTS: dict[str, Callable[[], Dialect]] = {
    "/v1/chat/completions": ChatDialect,
    "/v1/completions": CompletionsDialect,
    "/v1/responses": ResponsesDialect,
    "/v1/messages": MessagesDialect,
}
"""Model routes: at the root, and below /sessions/NAME."""


def build_app(service: RolloutService, admin_token: str, *, control_here: bool = True) -> FastAPI:
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
        endpoint = ModelEndpoint(dialect(), service.sessions, service.calls, service.core)
        for prefix in ("", "/sessions/{part}"):
            app.router.routes.append(Route(f"{prefix}{path}", endpoint, methods=["POST"]))
    for prefix in ("", "/sessions/{part}"):
        app.add_route(f"{prefix}/v1/models", models, methods=["GET"])
    if control_here:
        _add_control(app)
    return app


def control_app(service: RolloutService, admin_token: str) -> FastAPI:
    """The control routes alone, for an address that agents cannot reach."""
    app = _app(service, admin_token, None)
    _add_control(app)
    return app


def _app(service: RolloutService, admin_token: str, lifespan: Any) -> FastAPI:
    app = FastAPI(title="Palestra rollout service", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service, app.state.admin_token = service, admin_token
    app.add_exception_handler(ServerError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)
    return app


def _add_control(app: FastAPI) -> None:
    app.include_router(control)
    app.include_router(sessions)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError where the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(4096)
    return sock


def raise_file_limit() -> None:
    """Two descriptors a session: take all that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def serve(app: FastAPI, sock: socket.socket, on_ready: Callable[[str], None]) -> bool:
    """Serves until a signal; False where the application did not start (the cause is in the log)."""
    raise_file_limit()
    host, port = sock.getsockname()[:2]
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        lifespan="on",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config, lambda: on_ready(f"http://{host}:{port}"))
    asyncio.run(server.serve(sockets=[sock]))
    return server.started
