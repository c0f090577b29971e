"""Real routers in front of real engines, as the engine client uses them: keys stick, quarantined engines get nothing, and come back."""

from __future__ import annotations

import threading
import uuid
from collections.abc import AsyncIterator, Iterator

import httpx2 as httpx
import pytest

from palestra.cli.engines.commands import RouterKind, router_command
from palestra.cli.engines.environment import find
from palestra.cli.engines.fleet import EngineFleet
from palestra.cli.engines.ports import free_ports
from palestra.server.engine import EngineClient
from palestra.server.engine_wire import EngineSampling, Prompt
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.types import EnginePlace
from tests.live import until
from tests.sglang import SglangEngines, engine_environment

pytestmark = [pytest.mark.ci, pytest.mark.timeout(240)]
SAMPLING = EngineSampling(1.0, 4, ())


@pytest.fixture(scope="module", params=["sglang-router", "smg"])
def router(
    request: pytest.FixtureRequest, sglang_engines: SglangEngines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A router of our own command line, in front of engines that others run."""
    kind: RouterKind = request.param
    port, prometheus = free_ports("127.0.0.1", 2)
    sglang_engines.fresh()
    command = router_command(
        (),
        find(str(engine_environment())),
        port=port,
        prometheus_port=prometheus,
        kind=kind,
        external=sglang_engines.workers,
    )
    folder = tmp_path_factory.mktemp(kind)
    with EngineFleet(
        [], command, folder, start_deadline_s=120, say=print, external=sglang_engines.workers, device="cpu"
    ) as fleet:
        assert fleet.start(threading.Event())
        yield fleet.url


@pytest.fixture
async def client(router: str, sglang_engines: SglangEngines) -> AsyncIterator[EngineClient]:
    place = EnginePlace(router, sglang_engines.workers, router=True, kind="sglang")
    client = EngineClient(place, deadline_s=60.0)
    await client.open()
    try:
        await client.start(ModelFacts.of(range(20, 40), (), sglang_engines.folder, None))
        yield client
    finally:
        await client.close()


def served(engines: SglangEngines) -> list[int]:
    """Requests that each engine has answered."""
    counts = []
    for worker in engines.workers:
        lines = httpx.get(f"{worker}/metrics", timeout=10).text.splitlines()
        counts.append(sum(int(float(ln.split()[-1])) for ln in lines if ln.startswith("sglang:num_requests_total")))
    return counts


async def send(client: EngineClient, keys: list[str], engines: SglangEngines) -> list[int]:
    """One request of each key; how many each engine got of them."""
    before = served(engines)
    for key in keys:
        done = await client.generate(Prompt.of(range(20, 60)), SAMPLING, rid=uuid.uuid4().hex, key=key)
        assert 1 <= len(done.token_ids) == len(done.logprobs) <= 4
    await until(lambda: sum(served(engines)) - sum(before) >= len(keys), "the engines' counts", 30)
    return [now - then for now, then in zip(served(engines), before, strict=True)]


async def test_a_group_stays_on_its_engine_and_groups_are_spread(
    client: EngineClient, sglang_engines: SglangEngines
) -> None:
    shares = [await send(client, [f"group-{n}"] * 4, sglang_engines) for n in range(8)]
    assert all(max(share) == 4 for share in shares), shares
    assert {share.index(4) for share in shares} == {0, 1}, "groups go to both engines"


async def test_a_quarantined_engine_gets_nothing_until_it_is_admitted(
    client: EngineClient, sglang_engines: SglangEngines, router: str
) -> None:
    keys = [f"group-{n}" for n in range(8)]
    worker = client.fleet.members()[0]
    client.watcher.period_s = 3600.0  # the test says who serves
    await client.watcher.close()
    await client.fleet.quarantine(worker, "a test")
    await until(lambda: listed(router) == [sglang_engines.workers[1]], "its removal", 30)
    assert await send(client, keys, sglang_engines) == [0, 8]
    await client.fleet.admit(worker, 0)
    await until(lambda: listed(router) == sorted(sglang_engines.workers), "its return", 60)
    assert min(await send(client, keys, sglang_engines)) > 0


def listed(router: str) -> list[str]:
    """Engines that the router has and holds for healthy."""
    workers = httpx.get(f"{router}/workers", timeout=10).json()["workers"]
    return sorted(worker["url"] for worker in workers if worker["is_healthy"])
