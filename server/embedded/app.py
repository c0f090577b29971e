"""The HTTP surface: SGLang's native paths over an `Engine`.

In: requests. Out: JSON (errors too, with the status of their kind). /generate waits for its request's end, and drops it
when the client has gone.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import PlainTextResponse, Response

from palestra.server.embedded import wire
from palestra.server.embedded.answers import Handler, answer, read, refuse
from palestra.server.embedded.app_weights import WeightPaths
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.metrics import exposition, loads, server_info
from palestra.server.embedded.model import end_ids
from palestra.server.embedded.types import EmbeddedError, EngineOptions, GenerateCall, GenerateResult, RequestRefused
from palestra.server.embedded.updates import Updates

CLIENT_GONE = 499


class Api:
    """The handlers."""

    def __init__(self, engine: Engine, options: EngineOptions) -> None:
        self._engine, self._options = engine, options
        self._end_ids = end_ids(options.model_path)
        self.updates = Updates(engine, options.update_timeout_s)
        self._weights = WeightPaths(engine, self.updates, options.model_path)

    def app(self) -> FastAPI:
        """The application with all paths."""
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.add_exception_handler(EmbeddedError, refuse)
        posts: dict[str, Handler] = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush,
            **self._weights.posts(),
        }
        gets: dict[str, Handler] = {
            "/health": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
            "/weights_checker": self._weights.check,
            "/metrics": self.metrics,
        }
        for method, paths in (("POST", posts), ("GET", gets)):
            for path, handler in paths.items():
                app.add_route(path, handler, methods=[method])
        return app

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        started = time.perf_counter()
        body = await read(request, wire.GenerateBody)
        core = self._engine.core
        call = wire.to_call(
            body,
            vocab_size=core.model.vocab_size,
            context_length=core.context_length,
            end_ids=self._end_ids,
            allow_forced=self._options.allow_forced_ids,
        )
        if call.want_experts and not core.model.shape.top_k:
            raise RequestRefused("return_routed_experts: this model has no experts")
        if call.stop:
            await asyncio.to_thread(core.texts.load)  # a large vocabulary takes a second: the loop goes on meanwhile
        result = await self._unless_gone(request, call)
        if result is None:
            return Response(status_code=CLIENT_GONE)
        seconds = time.perf_counter() - started
        return answer(wire.to_answer(call, result, core.version, seconds, logprobs=body.return_logprob))

    async def _unless_gone(self, request: Request, call: GenerateCall) -> GenerateResult | None:
        """The result, or None where the client closed its connection first."""
        work = asyncio.create_task(self._engine.generate(call))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            work.cancel()
            gone.cancel()

    async def abort(self, request: Request) -> Response:
        """POST /abort_request: 200 also where nothing of that rid is under way, since it may just have ended."""
        body = await read(request, wire.AbortBody)
        if not body.abort_all and not body.rid:
            raise RequestRefused("rid or abort_all is needed")
        return answer({"success": True, "aborted": await self._engine.abort(None if body.abort_all else body.rid)})

    async def pause(self, request: Request) -> Response:
        """POST /pause_generation."""
        body = await read(request, wire.PauseBody)
        await self._engine.pause(body.mode)
        return answer({"status": "ok", "message": f"paused ({body.mode})"})

    async def resume(self, request: Request) -> Response:
        """POST /continue_generation."""
        await read(request, wire.EmptyBody)
        await self._engine.resume()
        return answer({"status": "ok", "message": "continued"})

    async def flush(self, request: Request) -> Response:
        """POST /flush_cache."""
        await read(request, wire.EmptyBody)
        await self._engine.flush()
        return answer({"success": True, "message": "prefix store emptied"})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the loop lives."""
        fault = self._engine.fault
        if fault is not None:
            return answer({"status": "dead", "cause": f"{type(fault).__name__}: {fault}"}, 503)
        return answer({"status": "ok"})

    async def model_info(self, request: Request) -> Response:
        """GET /model_info."""
        core, options = self._engine.core, self._options
        return answer(
            {
                "model_path": self._weights.model_path,
                "is_generation": True,
                "weight_version": core.version,
                "vocab_size": core.model.vocab_size,
                "context_length": core.context_length,
                "max_running_requests": options.max_running,
                "max_total_num_tokens": core.scheduler.max_tokens,
                "dtype": options.dtype,
                "paused": self._engine.paused,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """GET /server_info."""
        return answer(server_info(self._engine, self._options))

    async def loads(self, request: Request) -> Response:
        """GET /v1/loads."""
        return answer(loads(self._engine, self._options))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return PlainTextResponse(exposition(self._engine), media_type="text/plain; version=0.0.4")


async def _disconnected(request: Request) -> None:
    """Ends when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
