"""The service under test, as the role `palestra role service` starts it, with a probe of its event loop beside it.

In: a store folder, a model folder, an engine's URL, an admin token. Out: the real application (real renderer, real store, synchronous=FULL)
on a loopback port until SIGTERM. `POST /bench/lag` begins to measure how late the loop wakes a sleeper, `GET /bench/lag` says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from palestra.server.app import build_app, serve
from palestra.server.gateway.session import SessionLimits
from palestra.server.listen import bind, url_of
from palestra.server.plan.plan import PlanSettings
from palestra.server.renderer.registry import load_renderer
from palestra.server.service import RolloutService, ServiceSettings
from palestra.server.types import PublishMode
from palestra.server.workers.types import EnginePlace

TICK_S = 0.01
LIMITS = SessionLimits(max_turns=1000, max_response=1024, max_context=65_536, temperature=1.0)
PLAN = PlanSettings(
    groups_per_step=8,
    group_size=8,
    staleness=0,
    last_step=1,
    drop_zero_variance=True,
    retries=0,
    seed=0,
    shuffle=False,
    rollout_deadline_s=3600.0,
)


class LagProbe:
    """How late the event loop comes back to a task that sleeps TICK_S."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self, request: Request) -> Response:
        """POST: forgets what was measured and measures from here on."""
        self._late_s = []
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        return JSONResponse({"ok": True})

    async def look(self, request: Request) -> Response:
        """GET: the lateness so far, milliseconds."""
        late = sorted(self._late_s)
        if not late:
            return JSONResponse({"count": 0, "p50_ms": None, "p99_ms": None, "max_ms": None})
        parts = {"p50_ms": late[len(late) // 2], "p99_ms": late[int(len(late) * 0.99)], "max_ms": late[-1]}
        return JSONResponse({"count": len(late), **{name: 1e3 * value for name, value in parts.items()}})

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(loop.time() - due)


def run(store: Path, model: Path, engine: str, token: str, on_ready: Callable[[str], None]) -> bool:
    """Serves until SIGTERM; False where it did not start."""
    settings = ServiceSettings(
        store=store,
        engine=EnginePlace(engine),
        model="bench",
        limits=LIMITS,
        plan=PLAN,
        update_mode=PublishMode.RETRACT,
        deadline_s=120.0,
    )
    app = build_app(RolloutService(settings, load_renderer(model)), token)
    probe = LagProbe()
    app.add_route("/bench/lag", probe.begin, methods=["POST"])
    app.add_route("/bench/lag", probe.look, methods=["GET"])
    listener = bind("127.0.0.1", 0)
    return serve([(app, listener)], lambda: on_ready(url_of(listener)))
