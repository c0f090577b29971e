"""An engine in this process with a small numpy model (`tests/fakes/tiny_model.py`), behind the surface that real ones have.

It starts in milliseconds, really samples, caches and changes weights, and passes the suite of all engines. What it shares with the embedded
engine is how bodies are read and answers written, and the search for stop texts; the loop (`tiny_core`), drawing (`tiny_draw`) and weights
(`tiny_updates`) are its own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import ValidationError

from palestra.server.embedded import wire, wire_weights
from palestra.server.embedded.types import EmbeddedError, RequestRefused
from tests.fakes.tiny_core import TinyCore
from tests.fakes.tiny_updates import TinyUpdates, read_folder

PACE_S = 0.001
MAX_RUNNING = 64
WAIT_S = 30.0
Body = TypeVar("Body", bound=wire.Wire)


class Surface:
    """The paths."""

    def __init__(self, core: TinyCore, config: dict[str, Any], folder: Path) -> None:
        self._core, self._folder = core, folder
        self._vocab, self._window = int(config["vocab_size"]), int(config["max_position_embeddings"])
        self._ends = frozenset([int(config["eos_token_id"])])
        self._updates = TinyUpdates(core)

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=1 << 30, middlewares=[_refusals])
        updates = self._updates
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._does(wire.PauseBody, lambda body: self._core.pause(body.mode)),
            "/continue_generation": self._does(wire.EmptyBody, lambda body: self._core.resume()),
            "/flush_cache": self._does(wire.EmptyBody, lambda body: self._core.flush()),
            "/begin_weight_update": self._does(wire_weights.VersionBody, lambda body: updates.begin()),
            "/end_weight_update": self._does(wire_weights.VersionBody, lambda body: updates.end(body.weight_version)),
            "/update_weights_from_disk": self._does(wire_weights.DiskBody, updates.from_disk),
            "/update_weights_from_tensor": self._does(wire_weights.TensorBody, updates.from_tensors),
            "/update_weights_from_distributed": self._does(wire_weights.BroadcastBody, updates.from_group),
            "/init_weights_update_group": self._does(wire_weights.GroupBody, updates.join),
            "/destroy_weights_update_group": self._does(
                wire_weights.LeaveBody, lambda body: updates.leave(body.group_name)
            ),
            "/weights_checker": self._check,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        for path in ("/health", "/model_info", "/server_info", "/v1/loads"):
            app.router.add_get(path, self._describe)
        app.router.add_get("/metrics", self._metrics)
        return app

    def _does(
        self, kind: type[Body], work: Callable[[Body], Awaitable[None] | None]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A path that does something and says which version is in force then."""

        async def handler(request: web.Request) -> web.Response:
            if (waits := work(await _read(request, kind))) is not None:
                await waits
            return _json({"success": True, "message": "ok", "weight_version": self._core.version})

        return handler

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.GenerateBody)
        sizes = {"vocab_size": self._vocab, "context_length": self._window}
        call = wire.to_call(body, **sizes, end_ids=self._ends, allow_forced=False)
        if call.want_experts:
            raise RequestRefused("return_routed_experts: this model has no experts")
        result = await self._core.generate(call)
        return _json(wire.to_answer(call, result, self._core.version, 0.0, logprobs=body.return_logprob))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AbortBody)
        ended = self._core.abort(lambda live: body.abort_all or live.call.rid == body.rid)
        return _json({"success": True, "aborted": ended})

    async def _check(self, request: web.Request) -> web.Response:
        await _read(request, wire_weights.CheckBody)
        return _json({"success": True, "ranks": [{"checksums": self._updates.checksums()}]})

    async def _describe(self, request: web.Request) -> web.Response:
        core, room = self._core, MAX_RUNNING * self._window
        load = {
            "num_running_reqs": len(core.running),
            "num_waiting_reqs": len(core.queue),
            "max_running_requests": core.max_running,
            "max_total_num_tokens": room,
            "token_usage": sum(len(live.tokens) for live in core.running) / room,
        }
        return _json(
            {
                "model_path": str(self._folder),
                "weight_version": core.version,
                "vocab_size": self._vocab,
                "context_length": self._window,
                "max_total_num_tokens": room,
                "loads": [load],
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        core = self._core
        values = {
            "num_running_reqs": len(core.running),
            "num_queue_reqs": len(core.queue),
            "generation_tokens_total": core.generated,
            "prompt_tokens_total": core.prompted,
            "cached_tokens_total": core.reused,
        }
        return web.Response(text="".join(f"sglang:{name} {value}\n" for name, value in values.items()))


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except EmbeddedError as fault:
        return _json({"success": False, "message": str(fault)}, fault.status)


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(await request.read() or b"{}")
    except ValidationError as fault:
        raise RequestRefused(wire.explain(fault)) from fault


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """One that is served."""

    url: str
    core: TinyCore
    """For a look at its counters; it is in use by the engine's thread."""


@contextmanager
def tiny_engine(folder: Path, *, pace_s: float = PACE_S, max_running: int = MAX_RUNNING) -> Iterator[TinyEngine]:
    """Serves a folder of `make_tiny_numpy` on a loopback port, from a thread of this process. `pace_s`: what a step takes at least."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="tiny-engine")
    thread.start()

    async def start() -> tuple[TinyEngine, web.AppRunner, asyncio.Task[None]]:
        core = TinyCore(folder, read_folder(folder), max_running=max_running, pace_s=pace_s)
        surface = Surface(core, json.loads((folder / "config.json").read_text()), folder)
        # A client that leaves ends its request, as with a real engine.
        runner = web.AppRunner(surface.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        engine = TinyEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", core)
        return engine, runner, asyncio.create_task(core.run())

    async def stop(runner: web.AppRunner, work: asyncio.Task[None]) -> None:
        core.abort(lambda live: True)
        await runner.cleanup()
        work.cancel()
        await asyncio.wait([work])

    engine, runner, work = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    core = engine.core
    try:
        yield engine
        assert not work.done(), "the fake engine's loop has ended"
    finally:
        asyncio.run_coroutine_threadsafe(stop(runner, work), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()
