"""uvicorn, with a word on when it starts to answer and when it is told to stop: what every listener's process runs."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn


def config_of(app: Any, *, grace_s: int) -> uvicorn.Config:
    """How every listener of ours is served; `grace_s`: how long open requests are waited for at the end, seconds."""
    return uvicorn.Config(
        app,
        http="httptools",
        access_log=False,
        log_config=None,
        lifespan="on",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=grace_s,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )


class ReadyServer(uvicorn.Server):
    """`ready` is called once it answers; `stop`, if given, in the handler of the signal that ends it."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], stop: Callable[[], object] | None = None
    ) -> None:
        super().__init__(config)
        self._ready, self._stop = ready, stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn."""
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn in the signal handler."""
        if self._stop is not None:
            self._stop()
        super().handle_exit(sig, frame)


async def serve_until_told(
    config: uvicorn.Config,
    sock: socket.socket,
    on_ready: Callable[[], None],
    close: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Serves until SIGTERM or SIGINT; `on_ready` is called once it answers. `close` runs as soon as the signal comes, not when the
    connections are closed: their requests may wait for what it ends. False where it did not start (the cause is in the log).
    """
    loop = asyncio.get_running_loop()
    ends: set[asyncio.Future[None]] = set()

    def stop() -> None:
        if close is not None:
            loop.call_soon_threadsafe(lambda: ends.add(asyncio.ensure_future(close())))

    server = ReadyServer(config, on_ready, stop)
    # uvicorn raises the signal that ended it once more: this process would die of it before what it has to end is gone.
    before = {number: signal.signal(number, _heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await server.serve(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return server.started


def _heard(number: int, frame: FrameType | None) -> None:
    """A signal that was acted upon."""
