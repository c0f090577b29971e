"""The client behind a router whose workers die, freeze, restart and come late. Workers are scripted engines at the end of a cable that a
test cuts or freezes; the router is a stand-in with the worker API of the real one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from palestra.server.engine import EngineClient
from palestra.server.engine_wire import EngineSampling, Prompt
from palestra.server.types import Completion, EngineError
from palestra.server.workers.figures import Load
from palestra.server.workers.probe import ModelFacts
from palestra.server.workers.retries import EngineBusy, EngineLost
from palestra.server.workers.types import EnginePlace, Weights, Worker, WorkerState
from tests.fakes.engine import Fail, FakeEngine, Say, listening
from tests.fakes.router import FakeRouter
from tests.fakes.wire import Wire, wired
from tests.live import until

PROMPT = list(range(30, 40))
PLAIN = EngineSampling(1.0, 20, ())
VOCAB = 512


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(listening(FakeEngine(VOCAB, seed=n))) for n in range(2))  # type: ignore[misc]


@dataclass
class Field:
    """Two workers behind a router, and a client in front of it."""

    engines: tuple[FakeEngine, FakeEngine]
    wires: list[Wire]
    router: FakeRouter
    client: EngineClient

    def worker(self, at: int) -> Worker:
        return self.client.fleet.member(self.wires[at].url)

    def states(self) -> list[WorkerState]:
        return [self.worker(0).state, self.worker(1).state]

    def key(self, at: int) -> str:
        """A group whose requests go to this worker."""
        return self.router.key_for(self.wires[at].url)

    def send(self, key: str) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.client.generate(Prompt.of(PROMPT), PLAIN, rid=uuid.uuid4().hex, key=key))

    async def standing_still(self, at: int) -> None:
        await until(lambda: bool(self.engines[at].running), f"a request at worker {at}")

    def watch(self, version: int = 0, folder: str | None = None) -> None:
        """Starts the watcher, with these weights in force."""
        self.client.fleet.in_force(Weights(version, folder))
        self.client.watcher.period_s = 0.05
        self.client.watcher.start()


SERVING, OUT = WorkerState.SERVING, WorkerState.QUARANTINED


@asynccontextmanager
async def field_of(pair: tuple[FakeEngine, FakeEngine], *, named: bool = True) -> AsyncIterator[Field]:
    for engine in pair:
        engine.heard.clear()
        engine.controls.clear()
        engine._script.clear()
        engine.version = "default"
        engine.release()
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wired(engine.url)) for engine in pair]
        urls = tuple(wire.url for wire in wires)
        router = await stack.enter_async_context(FakeRouter(urls).listening())
        place = EnginePlace(router.url, urls if named else (), router=True, kind="sglang")
        client = EngineClient(place, deadline_s=20.0, retry_s=5.0)
        client.fleet.alive_s = 0.6
        await client.open()
        try:
            yield Field(pair, wires, router, client)
        finally:
            for engine in pair:
                engine.release()
            await client.close()


@pytest.fixture
async def field(pair: tuple[FakeEngine, FakeEngine]) -> AsyncIterator[Field]:
    async with field_of(pair) as field:
        yield field


async def test_a_worker_that_dies_costs_the_part_that_it_was_sampling(field: Field) -> None:
    field.engines[0].hold()
    done = field.send(field.key(0))
    await field.standing_still(0)
    await field.client.control("/abort_request", {"abort_all": True})
    await until(lambda: len(field.engines[0].heard) == 2, "the second part")
    await field.standing_still(0)
    kept = field.engines[0].heard[-1].prompt
    await field.wires[0].cut()
    field.engines[1].then(Say([43, 44]))
    completion = await done
    assert field.engines[1].heard[0].prompt == kept, "what was joined before is kept"
    assert [*PROMPT, *completion.token_ids] == [*kept, 43, 44]
    assert field.states() == [OUT, SERVING]
    assert "cannot be reached" in field.worker(0).why
    assert list(field.router.workers) == [field.wires[1].url]
    assert (field.client.faults, field.client.retries) == (1, 1)
    rids = [heard.rid for engine in field.engines for heard in engine.heard]
    assert len(set(rids)) == len(rids), "an attempt never has the name of one that was lost"


async def test_requests_that_lose_one_worker_share_one_look(field: Field) -> None:
    key = field.key(0)
    field.engines[0].hold()
    all_of = [field.send(key) for _ in range(8)]
    await until(lambda: len(field.engines[0].running) == 8, "all at worker 0")
    await field.wires[0].cut()
    assert len(await asyncio.gather(*all_of)) == 8
    assert field.client.fleet.quarantines == 1
    assert field.client.retries == 8


async def test_a_storm_of_503_is_waited_out_and_nobody_is_quarantined(field: Field) -> None:
    key = field.key(0)
    field.engines[0].then(Fail(503), Fail(429), Fail(503), Say([41]))
    assert (await field.send(key)).token_ids == (41,)
    assert (field.client.faults, field.client.fleet.quarantines) == (3, 0)
    assert field.states() == [SERVING, SERVING]
    field.client.retry_s = 0.1
    field.engines[0].then(*[Fail(503, "full")] * 10)
    with pytest.raises(EngineBusy, match=r"no room for .* HTTP 503: full"):
        await field.send(key)


async def test_when_all_are_dead_the_error_says_so_in_one_line(field: Field) -> None:
    field.client.retry_s = 0.3
    for wire in field.wires:
        await wire.cut()
    with pytest.raises(EngineLost, match=r"did not answer for .* s; last: .*HTTP 500") as lost:
        await field.send("g")
    assert "\n" not in str(lost.value)
    assert field.states() == [OUT, OUT]


async def test_a_frozen_worker_loses_its_requests_and_comes_back_by_itself(field: Field) -> None:
    stuck, moving = field.key(0), field.key(1)
    field.watch()
    for engine in field.engines:
        engine.hold()
    first, second = field.send(stuck), field.send(moving)
    await field.standing_still(0)
    await field.standing_still(1)
    field.wires[0].freeze()
    await until(lambda: field.states() == [OUT, SERVING], "the quarantine")
    assert "does not answer" in field.worker(0).why
    await until(lambda: field.wires[0].url not in field.router.workers, "the router to know")
    field.engines[1].release()
    done = await asyncio.gather(first, second)
    assert all(completion.token_ids for completion in done)
    assert {heard.key for heard in field.engines[1].heard} == {stuck, moving}
    field.wires[0].thaw()
    await until(lambda: field.states() == [SERVING, SERVING], "its return")
    await until(lambda: field.wires[0].url in field.router.workers, "the router to have it again")


async def test_the_last_worker_is_waited_for_while_it_is_frozen(field: Field) -> None:
    await field.client.fleet.quarantine(field.worker(1), "a test")
    field.watch()
    field.engines[0].hold()
    done = field.send("g")
    await field.standing_still(0)
    field.wires[0].freeze()
    await until(lambda: field.worker(0).state is OUT, "the quarantine")
    assert list(field.router.workers) == [field.wires[0].url], (
        "a request that waits is better off than one that is refused"
    )
    field.engines[0].release()
    field.wires[0].thaw()
    assert (await done).token_ids
    await until(lambda: field.worker(0).state is SERVING, "its return")


async def test_during_an_update_silence_is_no_fault_and_death_is(field: Field) -> None:
    field.watch()
    fleet = field.client.fleet
    fleet.updating = True
    field.wires[0].freeze()
    await fleet.suspect()
    await field.client.watcher.tick()
    assert field.states() == [SERVING, SERVING]
    field.wires[0].thaw()
    await field.wires[1].cut()
    await fleet.suspect()
    assert field.states() == [SERVING, OUT]


async def test_a_router_that_restarts_does_not_bring_a_quarantined_worker_back(field: Field) -> None:
    fleet = field.client.fleet
    field.watch(version=3)
    field.engines[1].version = "3"
    await until(lambda: field.states() == [OUT, SERVING], "the one without the weights to be found out")
    assert field.worker(0).why == "has version 0, not 3"
    await until(lambda: list(field.router.workers) == [field.wires[1].url], "the router to know")
    field.router.restart()
    await until(lambda: list(field.router.workers) == [field.wires[1].url], "it to be taken out again")
    assert fleet.quarantines == 1
    field.router.workers.clear()
    await until(lambda: list(field.router.workers) == [field.wires[1].url], "the serving one to be put back")


async def test_a_worker_that_restarted_is_brought_up_from_the_folder(field: Field) -> None:
    for engine in field.engines:
        engine.version = "3"
    field.watch(version=3, folder="/weights/v3")
    field.engines[0].version = "default"
    await until(lambda: field.client.fleet.quarantines == 1, "the quarantine")
    await until(lambda: field.states() == [SERVING, SERVING], "its return")
    assert (field.engines[0].version, field.worker(0).version) == ("3", 3)
    loads = [body for path, body in field.engines[0].controls if path == "/update_weights_from_disk"]
    assert loads == [{"model_path": "/weights/v3", "weight_version": "3", "flush_cache": True}]
    assert not [path for path, _ in field.engines[1].controls if path == "/update_weights_from_disk"]


async def test_a_late_worker_s_agent_fetches_the_weights_in_force(pair: tuple[FakeEngine, FakeEngine]) -> None:
    pulled: list[tuple[str | None, object]] = []

    async def pull(request: web.Request) -> web.Response:
        pulled.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response({"path": "/local/v3", "bytes": 1, "seconds": 0.0, "from": "delta"})

    app = web.Application()
    app.router.add_post("/pull", pull)
    async with field_of(pair) as field, TestServer(app) as agent:
        place = replace(
            field.client.fleet.place, agents={field.wires[0].url: str(agent.make_url(""))}, agent_token="secret"
        )
        client = field.client = EngineClient(place, deadline_s=20.0)
        await client.open()
        try:
            for engine in field.engines:
                engine.version = "3"
            field.engines[0].version = "2"
            client.fleet.in_force(Weights(3, shared="/shared"))
            client.watcher.period_s = 0.05
            client.watcher.start()
            await until(lambda: field.engines[0].version == "3", "the load")
            await until(lambda: field.states() == [SERVING, SERVING], "its return")
        finally:
            await client.close()
        assert pulled == [("Bearer secret", {"version": 3, "shared": "/shared"})]
        loads = [body["model_path"] for path, body in field.engines[0].controls if path == "/update_weights_from_disk"]
        assert loads == ["/local/v3"]


async def test_what_failed_an_update_is_not_trusted_for_naming_the_right_version(field: Field) -> None:
    fleet = field.client.fleet
    await fleet.quarantine(field.worker(0), "its checksum differs")
    fleet.in_force(Weights(0))
    for _ in range(3):
        await field.client.watcher.tick()
    assert field.worker(0).state is OUT, "there is no folder to bring it up from"
    field.watch(folder="/weights/v0")
    await until(lambda: field.worker(0).state is SERVING, "its return")
    await fleet.quarantine(field.worker(0), "again")
    await fleet.admit(field.worker(0), 0)
    assert (field.worker(0).state, field.worker(0).why) == (SERVING, "")


async def test_workers_are_learned_from_the_router_and_a_late_one_joins(
    pair: tuple[FakeEngine, FakeEngine],
) -> None:
    async with field_of(pair, named=False) as field:
        assert {worker.url for worker in field.client.fleet.members()} == {wire.url for wire in field.wires}
        for engine in pair:
            engine.version = "3"
        field.watch(version=3, folder="/weights/v3")
        with listening(FakeEngine(VOCAB, seed=7)) as late:
            field.router.workers[late.url] = str(uuid.uuid4())
            await until(lambda: late.url in {w.url for w in field.client.fleet.serving()}, "the late one to serve")
            assert late.version == "3"
            await until(lambda: late.url in field.router.workers, "the router to have it again")


async def test_the_start_goes_without_a_dead_worker_and_refuses_when_none_is_there(field: Field) -> None:
    await field.wires[0].cut()
    await field.client.start(ModelFacts(tuple(PROMPT), vocab_size=VOCAB))
    assert field.states() == [OUT, SERVING]
    assert field.worker(1).ranks == 1
    assert ("/continue_generation", {}) in field.engines[1].controls
    await field.wires[1].cut()
    with pytest.raises(EngineError, match="no engine answers"):
        await field.client.start(ModelFacts(tuple(PROMPT)))


async def test_the_start_takes_the_newest_weights_for_those_in_force(field: Field) -> None:
    field.engines[1].version = "5"
    await field.client.start(ModelFacts(tuple(PROMPT)))
    assert field.client.fleet.wanted == Weights(5)
    assert (field.states(), field.worker(0).why) == ([OUT, SERVING], "has version 0, not 5")


async def test_an_engine_that_is_unfit_is_refused_by_name(field: Field) -> None:
    flat = Say([41], meta={"output_token_logprobs": [[-6.238324625, 41, None]]})
    field.engines[1].then(flat)
    with pytest.raises(EngineError, match=rf"{field.wires[1].url}: the engine's logprobs are uniform"):
        await field.client.start(ModelFacts(tuple(PROMPT), vocab_size=VOCAB))


async def test_cancelling_reaches_the_living_when_one_is_dead(field: Field) -> None:
    field.engines[1].hold()
    name = uuid.uuid4().hex
    work = field.client.generate(Prompt.of(PROMPT), PLAIN, rid=name, key=field.key(1))
    task = asyncio.create_task(work)
    await field.standing_still(1)
    await field.wires[0].cut()
    await field.client.cancel(name)
    assert (await task).finish_reason == "abort"


async def test_a_group_leaves_a_full_worker_where_another_has_room(field: Field) -> None:
    waited = Say([41], meta={"queue_time": 9.0, "num_retractions": 0})
    key = field.key(0)
    field.engines[0].then(waited, waited)
    await field.send(key)
    assert field.client.pins.key(key) == key, "nobody is known to have room"
    field.client.watcher.loads = {field.wires[0].url: Load(64, 9, 1.0), field.wires[1].url: Load(3, 0, 0.1)}
    await field.send(key)
    assert field.client.pins.key(key) == f"{key}~1"
    await field.send(key)
    assert field.router.sent[-1][0] == f"{key}~1"
    assert field.client.metrics()["engine/unpins/count"] == 1.0


async def test_waiting_for_an_update_moves_no_group(field: Field) -> None:
    field.client.watcher.loads = {wire.url: Load(0, 0, 0.0) for wire in field.wires}
    key = field.key(0)
    field.engines[0].hold()
    field.engines[0].then(Say([41], meta={"num_retractions": 1, "queue_time": 9.0}))
    done = field.send(key)
    await field.standing_still(0)
    field.client.fleet.updating = True
    field.client.fleet.updating = False
    field.engines[0].release()
    await done
    assert field.client.pins.key(key) == key


async def test_the_salt_is_in_every_request_while_it_is_set(field: Field) -> None:
    await field.send("g")
    field.client.salt = "w3"
    await field.send("g")
    heard = [h for engine in field.engines for h in engine.heard]
    assert [h.body.get("extra_key") for h in heard] == [None, "w3"]


async def test_status_and_metrics_say_who_serves(field: Field) -> None:
    key = field.key(0)
    field.engines[0].then(Say([41], meta={"cached_tokens": 4}))
    await field.send(key)
    await field.client.fleet.quarantine(field.worker(1), "a test")
    metrics = field.client.metrics()
    assert metrics["engine/workers/serving"] == metrics["engine/quarantines/count"] == 1.0
    assert metrics["engine/prefix_hit/mean"] == metrics["engine/prefix_hit/first"] == 0.4
    assert field.client.metrics()["engine/quarantines/count"] == 0.0
    rows = field.client.status()
    assert [(row["state"], row["why"]) for row in rows] == [("serving", ""), ("quarantined", "a test")]
    assert field.client.workers == (field.wires[0].url,)


async def test_a_deadline_ends_a_request_on_the_wire(field: Field) -> None:
    field.engines[0].hold()
    field.engines[1].hold()
    with pytest.raises(EngineLost, match="did not answer"):
        await field.client.generate(Prompt.of(PROMPT), PLAIN, rid=uuid.uuid4().hex, key="g", deadline_s=0.2)
    assert field.client.on_wire == field.client.running == 0
