"""A publish without the rest of a service: the real publisher, its routes over HTTP, and the real client, in front of given workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from palestra.server.client import ServiceClient
from palestra.server.gate import Gate
from palestra.server.listen import bind
from palestra.server.publish_routes import publishing
from palestra.server.publishing.bodies import EndBody
from palestra.server.publishing.publisher import Publisher
from palestra.server.publishing.types import PublishReport
from palestra.server.routes import on_error
from palestra.server.signal import Signal
from palestra.server.types import PublishMode, ServerError
from palestra.server.workers.calls import Calls
from palestra.server.workers.table import WorkerTable
from palestra.server.workers.types import EngineKind, EnginePlace
from tests.live import TOKEN, wait_for


class Versions:
    """Published versions, in memory."""

    def __init__(self) -> None:
        self.highest = -1

    def highest_version(self) -> int:
        return self.highest

    def record_publish(self, version: int, train_step: int) -> None:
        self.highest = version


class Engines:
    """What a publish needs of the engine client, made on the running loop."""

    def __init__(self, place: EnginePlace) -> None:
        self.calls = Calls(dict.fromkeys(place.agents.values(), place.agent_token) if place.agent_token else {})
        self.fleet = WorkerTable(place, self.calls)
        self.gate, self.idle, self.on_wire = Gate(), Signal(), 0
        self.salt: str | None = None


class PublishService:
    """Answers on a loopback port, in a thread; `client` is a trainer's."""

    def __init__(
        self,
        workers: Sequence[str],
        *,
        kind: EngineKind = "embedded",
        mode: PublishMode = PublishMode.RETRACT,
        deadline_s: float = 60.0,
        agents: dict[str, str] | None = None,
        agent_token: str | None = None,
    ) -> None:
        self._place = EnginePlace(workers[0], tuple(workers), kind=kind, agents=agents or {}, agent_token=agent_token)
        self._made = (kind, mode, deadline_s)
        self._socket = bind("127.0.0.1", 0)
        host, port = self._socket.getsockname()[:2]
        app = FastAPI(lifespan=self._lifespan)
        app.state.service, app.state.admin_token = self, TOKEN
        app.include_router(publishing)
        app.add_exception_handler(ServerError, on_error)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = f"http://{host}:{port}"
        self.client = ServiceClient(self.url, TOKEN, retry_s=0.0)
        self.versions = Versions()

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        kind, mode, deadline_s = self._made
        self.engines = Engines(self._place)
        await self.engines.calls.open()
        self.publisher = Publisher(self.engines, kind, self.versions, mode, deadline_s)
        yield
        await self.engines.calls.close()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._socket])

    async def publish_end(self, body: EndBody) -> PublishReport:
        return await self.publisher.end(body)

    @property
    def states(self) -> dict[str, str]:
        """Worker -> its state."""
        return {worker.url: str(worker.state) for worker in self.engines.fleet.members()}

    def __enter__(self) -> PublishService:
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive(), "the publish service's start")
        assert self._server.started, "the publish service did not start"
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
