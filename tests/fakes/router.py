"""A router's worker API and nothing more, on the loop of the test: GET, POST and DELETE /workers, which take effect a moment after they are
answered; /generate goes to the worker that the routing key picks, without retries, and a worker that cannot be reached is a 500. All of it
as sglang-router 0.3.2 was seen to behave."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

LAG_S = 0.02
"""Before an added or removed worker is seen in the list."""


class FakeRouter:
    """See the module. `restart` makes it forget what was added and removed."""

    def __init__(self, started_with: Sequence[str]) -> None:
        self._started_with = tuple(started_with)
        self.workers: dict[str, str] = {}
        """URL -> id."""
        self.sent: list[tuple[str, str]] = []
        """(routing key, worker) of each request of /generate."""
        self.url = ""
        self._http: aiohttp.ClientSession | None = None
        self.restart()

    def restart(self) -> None:
        """It has the workers of its command line again."""
        self.workers = {url: str(uuid.uuid4()) for url in self._started_with}

    def pick(self, key: str) -> str:
        """The worker of a key; removing one moves only the keys that it had."""
        return max(self.workers, key=lambda url: hashlib.sha256(f"{key} {url}".encode()).digest())

    def key_for(self, url: str, start: str = "key") -> str:
        """A key that `url` gets."""
        return next(key for n in range(1000) if self.pick(key := f"{start}-{n}") == url)

    def app(self) -> web.Application:
        """The application with all paths."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._generate)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        rows = [{"id": name, "url": url, "worker_type": "regular"} for url, name in self.workers.items()]
        return web.json_response({"workers": rows, "total": len(rows)})

    async def _add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        name = self.workers.get(url) or str(uuid.uuid4())
        asyncio.get_running_loop().call_later(LAG_S, self.workers.__setitem__, url, name)
        return web.json_response({"status": "accepted", "worker_id": name}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        for url, name in self.workers.items():
            if name == request.match_info["id"]:
                asyncio.get_running_loop().call_later(LAG_S, self.workers.pop, url, None)
                return web.json_response({"status": "accepted", "worker_id": name}, status=202)
        return web.json_response({"error": "no such worker"}, status=404)

    async def _generate(self, request: web.Request) -> web.Response:
        assert self._http is not None
        if not self.workers:
            return web.json_response({"error": {"code": "no_available_workers"}}, status=503)
        key = request.headers.get("X-SMG-Routing-Key", "")
        worker = self.pick(key)
        self.sent.append((key, worker))
        try:
            headers = {"X-SMG-Routing-Key": key}
            async with self._http.post(f"{worker}/generate", data=await request.read(), headers=headers) as reply:
                return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")
        except aiohttp.ClientError as error:
            return web.json_response(
                {"error": {"code": "call_upstream_request_error", "message": str(error)}}, status=500
            )

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[FakeRouter]:
        """Serves on a loopback port while the context is open."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        async with aiohttp.ClientSession(connector=connector) as self._http:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()
