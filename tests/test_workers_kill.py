"""Two real engines behind a router: one is stopped for a while in the middle of its completions, and then killed."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from palestra.server.engine import EngineClient
from palestra.server.engine_wire import EngineSampling, Prompt
from palestra.server.types import Completion
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.types import EnginePlace, WorkerState
from tests.fakes.router import FakeRouter
from tests.live import engine_process

pytestmark = pytest.mark.walk
PROMPT = list(range(20, 60))
TOKENS = 400


@dataclass(frozen=True)
class Engine:
    url: str
    pid: int


@pytest.fixture(scope="module")
def engines(tiny_moe: Path) -> Iterator[list[Engine]]:
    """The test that kills one is the last."""
    found: list[Engine] = []
    with ExitStack() as stack:
        for _ in range(2):
            before = {child.pid for child in psutil.Process().children()}
            url = stack.enter_context(engine_process(tiny_moe, "--context-length", "1024", "--allow-forced-ids"))
            (pid,) = {child.pid for child in psutil.Process().children()} - before
            found.append(Engine(url, pid))
        yield found


@pytest.fixture
async def routed(engines: list[Engine]) -> AsyncIterator[tuple[FakeRouter, EngineClient]]:
    async with FakeRouter([engine.url for engine in engines]).listening() as router:
        client = EngineClient(EnginePlace(router.url, router=True), deadline_s=90.0)
        await client.open()
        await client.start(ModelFacts(tuple(PROMPT)))
        yield router, client
        await client.close()


def send(client: EngineClient, key: str, seed: int) -> tuple[tuple[int, ...], asyncio.Task[Completion]]:
    """A long request whose ids are known beforehand, so that a gap or a repetition at a seam is seen."""
    ids = tuple(np.random.default_rng(seed).integers(20, 400, TOKENS).tolist())
    sampling = EngineSampling(1.0, TOKENS, (), forced_ids=ids)
    work = client.generate(Prompt.of(PROMPT), sampling, rid=uuid.uuid4().hex, key=key)
    return ids, asyncio.create_task(work)


async def busy(client: EngineClient, url: str, tokens: float) -> None:
    """Until the engine has sampled so many tokens more."""
    begun: float | None = None
    async with asyncio.timeout(60):
        while True:
            text = await client.fleet.calls.text(f"{url}/metrics", 10.0)
            lines = [line for line in text.splitlines() if line.startswith("sglang:generation_tokens_total")]
            made = float(lines[0].split()[-1])
            begun = made if begun is None else begun
            if made >= begun + tokens:
                return


async def state(client: EngineClient, url: str, wanted: WorkerState) -> None:
    async with asyncio.timeout(60):
        while client.fleet.member(url).state is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def whole(requests: list[tuple[tuple[int, ...], asyncio.Task[Completion]]]) -> None:
    for ids, task in requests:
        done = await task
        assert done.token_ids == ids, "parts are joined without a gap or a repetition"
        assert len(done.logprobs) == TOKENS
        assert (done.spans[0].start, done.spans[-1].end) == (0, TOKENS)


@pytest.mark.timeout(180)
async def test_a_stopped_engine_loses_no_request_and_comes_back(
    engines: list[Engine], routed: tuple[FakeRouter, EngineClient]
) -> None:
    router, client = routed
    victim, _ = engines
    keys = [router.key_for(engine.url, f"group-{n}") for n in range(2) for engine in engines]
    requests = [send(client, key, seed) for seed, key in enumerate(keys)]
    await busy(client, victim.url, 40)
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        await state(client, victim.url, WorkerState.QUARANTINED)
        await whole(requests)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    await state(client, victim.url, WorkerState.SERVING)
    await whole([send(client, "after", 99)])


async def test_a_killed_engine_loses_no_request(engines: list[Engine], routed: tuple[FakeRouter, EngineClient]) -> None:
    router, client = routed
    victim, other = engines
    keys = [router.key_for(engine.url, f"group-{n}") for n in range(4) for engine in engines]
    requests = [send(client, key, seed) for seed, key in enumerate(keys)]
    await busy(client, victim.url, 40)
    os.kill(victim.pid, signal.SIGKILL)
    await whole(requests)
    assert client.fleet.member(victim.url).state is WorkerState.QUARANTINED
    assert list(router.workers) == [other.url]
    assert client.retries >= 4
    assert client.fleet.quarantines == 1
