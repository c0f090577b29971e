"""Real processes for tests: the embedded engine on a tiny model, and the service in front of it. Everything ends by pid."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvloop

from palestra.server.app import build_app
from palestra.server.gateway.session import SessionLimits
from palestra.server.listen import bind
from palestra.server.plan.types import PlanSettings
from palestra.server.renderer.registry import load_renderer
from palestra.server.service import RolloutService, ServiceSettings
from palestra.server.types import PublishMode
from palestra.server.workers.types import EnginePlace

TOKEN = "test-admin-token"


def wait_for(check: Any, what: str, deadline_s: float = 60.0) -> Any:
    """Polls until `check` gives something true; AssertionError after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.02)
    return value


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """As `wait_for`, on a loop that goes on meanwhile."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {deadline_s:.0f} s") from None


@contextmanager
def engine_process(model: Path, *flags: str) -> Iterator[str]:
    """The embedded engine as a process; gives its URL."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    command = [
        sys.executable,
        "-m",
        "palestra.server.embedded",
        "--model-path",
        str(model),
        "--num-threads",
        "1",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the engine did not start: exit status {process.wait(10)}"
        yield str(json.loads(line)["url"])
    finally:
        process.kill()
        process.wait()


def settings(store: Path, engine_url: str, **changes: Any) -> ServiceSettings:
    """Settings for a service on a tiny model; `changes` go to the plan, the limits or the settings themselves by name."""
    limits = {"max_turns": 8, "max_response": 96, "max_context": 900, "temperature": 1.0}
    plan = {
        "groups_per_step": 2,
        "group_size": 2,
        "staleness": 0,
        "last_step": 4,
        "drop_zero_variance": True,
        "retries": 1,
        "seed": 0,
        "shuffle": True,
        "rollout_deadline_s": 60.0,
    }
    top: dict[str, Any] = {"engine": EnginePlace(engine_url), "update_mode": PublishMode.RETRACT, "deadline_s": 60.0}
    for name, value in changes.items():
        table = limits if name in limits else plan if name in PlanSettings.__slots__ else top
        table[name] = value
    return ServiceSettings(
        store=store,
        model="tiny",
        limits=SessionLimits(**limits),  # type: ignore[arg-type]
        plan=PlanSettings(**plan),  # type: ignore[arg-type]
        **top,
    )


class LiveService:
    """The service on a loopback port, in a thread of this process."""

    def __init__(self, settings: ServiceSettings, model: Path) -> None:
        import uvicorn

        self.service = RolloutService(settings, load_renderer(model))
        self._socket = bind("127.0.0.1", 0)
        app = build_app(self.service, TOKEN)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{host}:{port}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._socket])

    def __enter__(self) -> LiveService:
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive(), "the service's start")
        assert self._server.started, "the service did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the service's own loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One control call; AssertionError unless it is answered with 200."""
        answer = httpx.request(
            method, self.url + path, json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def open(
        self, rollout: str = "r0", group: str = "other", index: int = 0, attempt: int = 0, **extra: Any
    ) -> dict[str, Any]:
        """Opens a session."""
        body = {"rollout_id": rollout, "attempt": attempt, "group_id": group, "task_id": "t", "index": index, **extra}
        return dict(self.admin("POST", "/v1/sessions", body))

    def chat(self, key: str, messages: list[dict[str, Any]], path: str = "/v1", **body: Any) -> httpx.Response:
        """One model call."""
        return httpx.post(
            f"{self.url}{path}/chat/completions",
            json={"model": "tiny", "messages": messages, **body},
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )
