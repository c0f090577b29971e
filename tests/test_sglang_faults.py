"""Faults of real engines and of the real router, with clients in the middle of their conversations.

Nobody is told of any: every acknowledged turn is on record once, waits end, and the service says in one line what it saw. The command that
started the engines starts them again, and the service brings them up to the weights in force before they get requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.types import SessionHandle
from palestra.server.client import ServiceClient
from palestra.server.renderer.registry import load_renderer
from palestra.server.service import RolloutService
from palestra.server.types import EngineError
from palestra.server.workers.types import EnginePlace
from tests.live import TOKEN, LiveService, settings, wait_for
from tests.outsiders import check_acknowledged, play
from tests.sglang import BACK_S, SglangEngines
from tests.tiny import make_tiny_llama

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]
SESSIONS, TURNS, TOKENS = 16, 4, 120


class Stage:
    """A service on the engines, and conversations in it."""

    def __init__(self, live: LiveService, engines: SglangEngines) -> None:
        self.live, self.engines = live, engines
        self.client = ServiceClient(live.url, TOKEN)
        self.heard: list[tuple[int, str]] = []
        self.version = 0

    def publish(self, folder: Path) -> int:
        """Gives all engines the weights in a folder."""
        self.version += 1
        self.begin()
        self.end(folder)
        return self.version

    def begin(self) -> None:
        self.live.admin("POST", "/admin/publish/begin", {"version": self.version, "train_step": 0})

    def end(self, folder: Path) -> None:
        self.live.admin("POST", "/admin/publish/end", {"version": self.version, "path": str(folder)})

    @contextlib.contextmanager
    def talking(self) -> Iterator[Callable[[], None]]:
        """Conversations go on while the block runs; in the end all of them must be whole. The block gets a wait for the first replies."""
        handles = [self.client.open(max_turns=TURNS, max_response=TOKENS, max_context=1500) for _ in range(SESSIONS)]
        with ThreadPoolExecutor(SESSIONS) as pool:
            runs: list[Future[list[str]]] = [
                pool.submit(play, handle, n, self.heard, TURNS, TOKENS) for n, handle in enumerate(handles)
            ]
            before = len(self.heard)
            yield lambda: wait_for(lambda: len(self.heard) > before + SESSIONS // 2, "the first replies", 120) and None
            acknowledged = [run.result(200) for run in runs]
        self.check(handles, acknowledged)

    def check(self, handles: list[SessionHandle], acknowledged: list[list[str]]) -> None:
        assert [len(replies) for replies in acknowledged] == [TURNS] * SESSIONS
        check_acknowledged(self.client, handles, acknowledged)

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["url"]: worker for worker in self.client.status()["workers"]}

    def all_serve(self) -> bool:
        found = self.workers().values()
        return all(worker["state"] == "serving" and worker["version"] == self.version for worker in found)


@pytest.fixture
def stage(sglang_engines: SglangEngines, tmp_path: Path) -> Iterator[Stage]:
    sglang_engines.fresh()
    place = EnginePlace(sglang_engines.router, sglang_engines.workers, router=True, kind="sglang")
    chosen = settings(tmp_path / "store", "", engine=place, deadline_s=120.0)
    with LiveService(chosen, sglang_engines.folder) as live:
        stage = Stage(live, sglang_engines)
        stage.publish(sglang_engines.folder)
        yield stage


def group_of(pid: int, number: int) -> None:
    """A signal to a process and all that it has started."""
    os.killpg(os.getpgid(pid), number)


def test_an_engine_killed_while_it_generates(stage: Stage) -> None:
    name, url = "engine-0", stage.engines.workers[0]
    with stage.talking() as begun:
        begun()
        pid = stage.engines.pids()[name]
        group_of(pid, signal.SIGKILL)
        wait_for(lambda: stage.workers()[url]["state"] == "quarantined", "the quarantine", 30)
        assert stage.workers()[url]["why"]
    wait_for(lambda: stage.engines.pids()[name] != pid, "another process", BACK_S)
    wait_for(stage.all_serve, "the engine's return with the weights in force", BACK_S)


def test_an_engine_killed_in_the_middle_of_an_update(stage: Stage) -> None:
    name, url = "engine-1", stage.engines.workers[1]
    with stage.talking() as begun:
        begun()
        stage.version += 1
        stage.begin()
        pid = stage.engines.pids()[name]
        group_of(pid, signal.SIGKILL)
        stage.end(stage.engines.other)
        assert stage.workers()[url]["state"] == "quarantined"
        assert stage.workers()[stage.engines.workers[0]]["version"] == stage.version
    wait_for(lambda: stage.engines.pids()[name] != pid, "another process", BACK_S)
    wait_for(stage.all_serve, "the engine's return with the weights in force", BACK_S)


def test_an_engine_that_stands_still_for_20_seconds(stage: Stage) -> None:
    pid = stage.engines.pids()["engine-0"]
    with stage.talking() as begun:
        begun()
        group_of(pid, signal.SIGSTOP)
        woken = threading.Timer(20.0, group_of, (pid, signal.SIGCONT))
        woken.start()
        try:
            wait_for(lambda: stage.workers()[stage.engines.workers[0]]["state"] == "quarantined", "the quarantine", 19)
        finally:
            woken.join()
    wait_for(stage.all_serve, "the engine's return", 60)
    assert stage.engines.pids()["engine-0"] == pid, "it was left alone"


def test_the_router_killed(stage: Stage) -> None:
    pid = stage.engines.pids()["router"]
    with stage.talking() as begun:
        begun()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: stage.engines.pids()["router"] != pid, "another router", 60)
    wait_for(stage.all_serve, "both engines", 60)


def test_engines_with_another_model_are_refused_in_one_line(sglang_engines: SglangEngines, tmp_path: Path) -> None:
    place = EnginePlace(sglang_engines.router, sglang_engines.workers, router=True, kind="sglang")
    llama = make_tiny_llama(tmp_path / "llama")
    service = RolloutService(settings(tmp_path / "store", "", engine=place, model_folder=llama), load_renderer(llama))

    async def start() -> None:
        try:
            await service.start()
        finally:
            await service.close()

    with pytest.raises(EngineError, match=r"Qwen3MoeForCausalLM.*LlamaForCausalLM|LlamaForCausalLM.*Qwen3Moe") as told:
        asyncio.run(start())
    assert len(str(told.value).splitlines()) == 1
    assert any(worker in str(told.value) for worker in sglang_engines.workers)
