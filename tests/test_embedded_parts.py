"""The embedded engine's parts in this process: the core's steps, the scheduler's bounds, the prefix store, and the loop's death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx2
import pytest
import torch
import torch.distributed as dist

from palestra.server.embedded.app import Api
from palestra.server.embedded.core import Core, Finished
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.groups import GroupPlace, Groups
from palestra.server.embedded.jobs import Job
from palestra.server.embedded.prefixes import PrefixStore
from palestra.server.embedded.types import (
    EngineDied,
    EngineOptions,
    GenerateCall,
    RequestRefused,
    TensorSlot,
    WeightsRefused,
)
from palestra.server.embedded.workspace import CacheShape, Workspace
from tests.conformance.engine_kit import full_forward, wait_until
from tests.tiny import make_tiny_moe

pytestmark = pytest.mark.walk


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), initializer_range=0.1)


def call(rid: str, prompt: range, new: int = 8) -> GenerateCall:
    return GenerateCall(rid, tuple(prompt), 1.0, new, frozenset(), seed=sum(rid.encode()))


def run_all(core: Core, calls: list[GenerateCall]) -> list[Finished]:
    for order, one in enumerate(calls):
        core.scheduler.add(core.job(one, order))
    finished: list[Finished] = []
    for _ in range(10_000):
        finished += core.step()
        if len(finished) == len(calls):
            return finished
    raise AssertionError(f"only {len(finished)} of {len(calls)} requests ended")


@pytest.mark.parametrize(
    "bounds",
    [
        {"chunk_size": 7},
        {"max_running": 3},
        {"max_total_tokens": 150, "page_size": 4},
        {"page_size": 1},
        {"chunk_size": 2, "max_running": 5, "max_total_tokens": 90},
    ],
)
def test_no_bound_changes_the_numbers(folder: Path, bounds: dict[str, int]) -> None:
    core = Core(EngineOptions(str(folder), **bounds))
    calls = [call(f"r{i}", range(10 + i, 50 + 2 * i), new=5 + 3 * i) for i in range(8)]
    for job, result in run_all(core, calls):
        assert len(result.token_ids) == job.call.max_new_tokens
        expected = full_forward(folder, list(job.call.prompt), list(result.token_ids), 1.0)
        assert max(abs(a - b) for a, b in zip(expected, result.logprobs, strict=True)) < 1e-4
    assert not core.scheduler.running
    assert not core.scheduler.queue


def test_the_token_bound_is_kept_and_the_oldest_goes_on(folder: Path) -> None:
    core = Core(EngineOptions(str(folder), max_total_tokens=100))
    for order in range(4):
        core.scheduler.add(Job(call(f"r{order}", range(10, 40), new=60), order))
    ended: list[str] = []
    while len(ended) < 4:
        ended += [job.call.rid for job, _ in core.step()]
        assert sum(len(job.tokens) for job in core.scheduler.running) <= 100 + len(core.scheduler.running)
    assert ended == ["r0", "r1", "r2", "r3"]


def test_results_do_not_depend_on_the_company(folder: Path) -> None:
    core = Core(EngineOptions(str(folder)))
    calls = [call(f"r{i}", range(10 + i, 40 + i), new=12) for i in range(6)]
    together = {job.call.rid: result.token_ids for job, result in run_all(core, calls)}
    for one in calls:
        assert run_all(core, [one])[0][1].token_ids == together[one.rid]


SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.float32, top_k=1)


def filled(tokens: int, value: float) -> Workspace:
    space = Workspace(SHAPE, slots=2, limit=64)
    space.kv[:, :, 0, :, :tokens] = torch.arange(tokens)[:, None] + value
    assert space.experts is not None
    space.experts[0, :tokens, :, 0] = torch.arange(tokens, dtype=torch.int16)[:, None]
    return space


def test_pages_come_back_as_they_were() -> None:
    store = PrefixStore(SHAPE, pages=4, page_size=4)
    names: list[bytes] = []
    store.extend_names(names, range(10), "")
    assert len(names) == 2
    space = filled(8, 100.0)
    store.save(names, space, 0)
    store.load(names, space, 1)
    assert torch.equal(space.kv[:, :, 1, :, :8], space.kv[:, :, 0, :, :8])
    assert space.experts is not None
    assert torch.equal(space.experts[1, :8], space.experts[0, :8])


def test_the_store_drops_the_least_recently_used_from_its_end() -> None:
    store = PrefixStore(SHAPE, pages=4, page_size=4)
    chains: list[list[bytes]] = [[], [], []]
    for chain, start in zip(chains, (0, 50, 99), strict=True):
        store.extend_names(chain, range(start, start + 8), "")
    space = filled(8, 0.0)
    store.save(chains[0], space, 0)
    store.save(chains[1], space, 0)
    store.load(chains[0], space, 1)
    store.save(chains[2][:1], space, 0)
    assert [store.match(chain) for chain in chains] == [2, 1, 1]
    assert len(store) == 4
    store.clear()
    assert [store.match(chain) for chain in chains] == [0, 0, 0]


def test_names_tell_prefixes_and_salts_apart() -> None:
    store = PrefixStore(SHAPE, pages=4, page_size=2)
    named = []
    for tokens, salt in (([1, 2, 3, 4], ""), ([3, 4, 1, 2], ""), ([1, 2, 3, 4], "x")):
        names: list[bytes] = []
        store.extend_names(names, tokens, salt)
        named += names
    assert len(set(named)) == 6


class FailingCore(Core):
    """A core whose third step fails, as a full memory would make it."""

    steps = 0

    def step(self) -> list[Finished]:
        self.steps += 1
        if self.steps == 3:
            raise MemoryError("no room for the next step")
        return super().step()


async def test_a_dead_loop_tells_everybody(folder: Path) -> None:
    options = EngineOptions(str(folder), max_running=2)
    engine = Engine(FailingCore(options), num_threads=1)
    loop = asyncio.create_task(engine.run())
    transport = httpx2.ASGITransport(app=Api(engine, options).app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
        assert (await client.get("/health")).status_code == 200
        calls = [engine.generate(call(f"r{i}", range(10, 20), new=50)) for i in range(5)]
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert [type(fault) for fault in ended] == [EngineDied] * 5
        assert all("no room for the next step" in str(fault) for fault in ended)
        health = await client.get("/health")
        assert health.status_code == 503
        assert "no room" in health.text
        for path in ("/generate", "/pause_generation", "/flush_cache"):
            body = {"input_ids": [10]} if path == "/generate" else {}
            late = await client.post(path, json=body)
            assert late.status_code == 500
            assert "no room" in late.json()["message"]
    await asyncio.wait_for(loop, 60)


async def test_nothing_is_kept_of_requests_that_ended(folder: Path) -> None:
    engine = Engine(Core(EngineOptions(str(folder), max_running=4)), num_threads=1)
    loop = asyncio.create_task(engine.run())
    results = await asyncio.gather(*(engine.generate(call(f"r{i}", range(10, 20 + i))) for i in range(12)))
    assert [len(result.token_ids) for result in results] == [8] * 12
    dropped = asyncio.create_task(engine.generate(call("dropped", range(10, 30), new=900)))
    await asyncio.to_thread(wait_until, lambda: engine.core.generated >= 8 * 12 + 4, "the first tokens")
    dropped.cancel()
    await asyncio.wait({dropped})
    again = await asyncio.wait_for(engine.generate(call("dropped", range(10, 30))), 60)
    assert len(again.token_ids) == 8
    with pytest.raises(RequestRefused, match="mode"):
        await engine.pause("sideways")
    assert (engine.running, engine.queued, engine._waiting) == (0, 0, {})
    loop.cancel()
    await asyncio.wait({loop})
    with pytest.raises(EngineDied, match="shutting down"):
        await engine.generate(call("late", range(10, 20)))


async def test_leaving_a_weight_group_ends_a_receive_that_waits_in_it() -> None:
    """gloo alone would wait for rank 0 until the group's timeout."""
    wait = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=wait)
    groups = Groups(30)
    joined = asyncio.create_task(groups.join("g", GroupPlace("127.0.0.1", store.port, 1, 2, "gloo")))
    keys = dist.PrefixStore("cpu/", dist.PrefixStore("g/", dist.PrefixStore("g", store)))
    sender = await asyncio.to_thread(dist.ProcessGroupGloo, keys, 0, 2, wait)
    await joined
    receiving = asyncio.create_task(groups.receive("g", [TensorSlot("x", "float32", (4,))], flattened=False))
    await asyncio.sleep(0)  # it waits from its first turn on
    assert groups.leave("g")
    with pytest.raises(WeightsRefused, match="left before"):
        await asyncio.wait_for(receiving, 10)
    assert not groups.leave("g")
    del sender  # ends the thread that still waits
