"""The engine process: loads the model, binds a port, serves until it is told to stop.

In: options. Out: the base URL, once requests are answered. SIGTERM and SIGINT end it: waiting requests are answered
with an error at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from palestra.server.embedded.app import Api
from palestra.server.embedded.core import Core
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.types import EngineOptions
from palestra.server.ready import ReadyServer

GRACE_S = 5


def serve(options: EngineOptions, on_ready: Callable[[str], None]) -> None:
    """Runs the engine in this thread until a signal ends it. `on_ready` gets the base URL.

    Raises:
        ModelRefused: the model folder cannot be served.
        OSError: the address cannot be bound.
    """
    listener = socket.create_server((options.host, options.port), backlog=2048)
    with listener:
        core = Core(options)
        asyncio.run(_serve(core, options, listener, on_ready))


async def _serve(core: Core, options: EngineOptions, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    engine = Engine(core, options.num_threads)
    loop = asyncio.get_running_loop()
    work = asyncio.create_task(engine.run())
    host, port = listener.getsockname()[:2]
    api = Api(engine, options)
    config = uvicorn.Config(api.app(), access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE_S)

    def stop() -> None:
        work.cancel()
        api.updates.close()

    server = ReadyServer(
        config,
        ready=lambda: on_ready(f"http://{host}:{port}"),
        stop=lambda: loop.call_soon_threadsafe(stop),
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        stop()
        await asyncio.wait({work})
