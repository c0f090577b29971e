"""The control half of a publish against scripted engines: who is held how, who is left out for what, what is never left behind."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from palestra.server.publishing.bodies import AnnounceBody, CanaryBody, EndBody, HandlesBody
from palestra.server.publishing.publisher import Publisher
from palestra.server.publishing.verify import canary_gap, comparable, tolerance, wrong_digests, wrong_versions
from palestra.server.types import EngineError, PublishMode, SessionError
from palestra.server.workers.types import EnginePlace
from tests.publishing import Engines, Versions


class ScriptedEngine:
    """SGLang's control surface, obedient but for what `faults` says: path -> HTTP status, or None for a call that is never answered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, int | None] = {}
        self.version, self.sum, self.url = "default", "a" * 16, ""
        self.freed, self.hanging = asyncio.Event(), asyncio.Event()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def body(self, path: str) -> Any:
        return dict(self.calls)[path]

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.method == "POST" else {}
        if request.method == "POST":
            self.calls.append((path, body))
        if path in self.faults:
            if (status := self.faults[path]) is None:
                self.hanging.set()
                await self.freed.wait()
                return web.json_response({"success": False, "message": "the other side is gone"}, status=400)
            return web.json_response({"success": False, "message": "scripted"}, status=status)
        if path in ("/model_info", "/server_info"):
            return web.json_response(
                {"weight_version": self.version, "device": "cpu", "dtype": "float32", "quantization": None}
            )
        if path == "/weights_checker":
            return web.json_response({"success": True, "ranks": [{"checksums": {"w": self.sum}}]})
        if path == "/generate":
            logprobs = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
            return web.json_response({"meta_info": {"input_token_logprobs": logprobs}})
        self.version = str(body.get("weight_version") or self.version)
        return web.json_response({"success": True})


class Scene:
    """A publisher in front of scripted engines."""

    def __init__(self) -> None:
        self.engines: list[ScriptedEngine] = []
        self.runners: list[web.AppRunner] = []

    async def start(self, count: int, mode: PublishMode = PublishMode.RETRACT, deadline_s: float = 5.0) -> Publisher:
        for _ in range(count):
            engine, app = ScriptedEngine(), web.Application()
            app.router.add_route("*", "/{tail:.*}", engine.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self.engines.append(engine)
            self.runners.append(runner)
        urls = tuple(engine.url for engine in self.engines)
        self.client = Engines(EnginePlace(urls[0], urls, kind="sglang"))
        await self.client.calls.open()
        return Publisher(self.client, "sglang", Versions(), mode, deadline_s)

    def states(self) -> list[str]:
        return [str(worker.state) for worker in self.client.fleet.members()]

    async def close(self) -> None:
        for engine in self.engines:
            engine.freed.set()
        await self.client.calls.close()
        for runner in self.runners:
            await runner.cleanup()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.close()


def end(version: int, path: str | None = "/weights", **more: Any) -> EndBody:
    return EndBody(version, path, **more)


def announce(last: bool = True, timeout_s: float = 5.0) -> AnnounceBody:
    return AnnounceBody("g", ["w"], ["float32"], [[2]], last, timeout_s)


PAUSES = {"finish": "retract", "retract": "retract", "in_place": "in_place", "abort": "abort"}


@pytest.mark.parametrize("mode", list(PublishMode))
async def test_a_publish_by_folder(scene: Scene, mode: PublishMode) -> None:
    publisher = await scene.start(2, mode)
    target = await publisher.begin(3, 2, "disk")
    assert [worker.url for worker in target.workers] == [engine.url for engine in scene.engines]
    assert (target.kind, target.device, publisher.version) == ("sglang", "cpu", 3)
    assert scene.client.fleet.updating
    assert scene.engines[0].calls == [], "engines go on while nothing has to be loaded"
    report = await publisher.end(end(3))
    flush = mode is not PublishMode.IN_PLACE
    for engine in scene.engines:
        assert engine.paths() == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert engine.body("/pause_generation") == {"mode": PAUSES[mode.value]}
        wanted = {"model_path": "/weights", "weight_version": "3", "flush_cache": flush}
        assert engine.body("/update_weights_from_disk") == wanted
    assert scene.client.salt == (None if flush else "w3"), "prompts must not find the caches of older weights"
    assert (report.serving, report.left_out, report.train_step, report.calls) == (2, {}, 2, 1)
    assert [worker.version for worker in scene.client.fleet.serving()] == [3, 3]
    assert scene.client.gate.is_set()
    assert not scene.client.fleet.updating
    assert publisher.version is None
    figures = publisher.figures()
    assert figures["weights/still_s/mean"] == report.still_s > 0


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"]
)
@pytest.mark.parametrize("status", [400, 500])
async def test_a_worker_that_fails_a_step_is_left_out(scene: Scene, path: str, status: int) -> None:
    publisher = await scene.start(3)
    scene.engines[1].faults[path] = status
    await publisher.begin(1, 1, "disk")
    report = await publisher.end(end(1, digests={"w": ("a" * 16, ())}))
    assert scene.states() == ["serving", "quarantined", "serving"]
    assert (report.serving, list(report.left_out)) == (2, [scene.engines[1].url])
    assert "scripted" in report.left_out[scene.engines[1].url]
    assert publisher.quarantined == 1
    assert "/continue_generation" in scene.engines[1].paths(), "it is not left standing"


async def test_no_engine_took_it_all_go_on_as_they_were(scene: Scene) -> None:
    publisher = await scene.start(2)
    for engine in scene.engines:
        engine.faults["/update_weights_from_disk"] = 400
    await publisher.begin(1, 1, "disk")
    with pytest.raises(EngineError, match=r"no engine has version 1: .*scripted"):
        await publisher.end(end(1))
    assert scene.states() == ["serving", "serving"], "their weights are whole"
    assert all(engine.paths()[-1] == "/continue_generation" for engine in scene.engines)
    assert not scene.client.fleet.updating
    with pytest.raises(SessionError, match="no publish is open"):
        await publisher.end(end(1))


async def test_other_content_and_other_versions_are_found(scene: Scene) -> None:
    publisher = await scene.start(3)
    scene.engines[0].sum = "b" * 16
    await publisher.begin(1, 1, "disk")
    report = await publisher.end(end(1, digests={"w": ("a" * 16, ())}))
    assert "other weights than the trainer: w" in report.left_out[scene.engines[0].url]
    assert scene.states() == ["quarantined", "serving", "serving"]


async def test_late_joiners_take_part_and_are_admitted(scene: Scene) -> None:
    publisher = await scene.start(2)
    late = scene.client.fleet.members()[1]
    await scene.client.fleet.quarantine(late, "it was away")
    scene.engines[1].calls.clear()
    await publisher.begin(1, 1, "disk")
    await publisher.end(end(1))
    assert scene.engines[1].body("/pause_generation") == {"mode": "abort"}, "what it still runs is nobody's"
    assert scene.states() == ["serving", "serving"]


async def test_a_dead_worker_is_found_before_anybody_stands_still(scene: Scene) -> None:
    publisher = await scene.start(2)
    await scene.runners[1].cleanup()
    target = await publisher.begin(1, 1, "tensor")
    assert [worker.url for worker in target.workers] == [scene.engines[0].url]
    assert scene.states() == ["serving", "quarantined"]
    await publisher.cancel(1)
    assert not scene.client.fleet.updating


async def test_versions_are_never_reused_and_a_lost_reply_is_given_again(scene: Scene) -> None:
    publisher = await scene.start(1)
    first = await publisher.begin(4, 1, "disk")
    assert await publisher.begin(4, 1, "disk") == first
    await publisher.end(end(4))
    with pytest.raises(SessionError, match="never reused"):
        await publisher.begin(4, 1, "disk")
    await publisher.begin(5, 2, "disk")
    with pytest.raises(SessionError, match="version 5 is being published, not 4"):
        await publisher.hold(4)


async def test_finish_waits_for_running_requests_and_holds_new_ones(scene: Scene) -> None:
    publisher = await scene.start(1, PublishMode.FINISH)
    scene.client.on_wire = 1
    await publisher.begin(1, 1, "tensor")
    holding = asyncio.create_task(publisher.hold(1))
    await asyncio.sleep(0)  # to where it waits
    assert not scene.client.gate.is_set()
    assert scene.engines[0].calls == []
    scene.client.on_wire = 0
    scene.client.idle.notify()
    await holding
    assert scene.engines[0].paths() == ["/pause_generation", "/begin_weight_update"]
    await publisher.handles(HandlesBody({scene.engines[0].url: ["x"]}, "flattened_bucket", True))
    await publisher.end(end(1, None))
    assert publisher.last.drain_s > 0
    assert scene.client.gate.is_set()


async def test_finish_gives_up_at_its_deadline(scene: Scene) -> None:
    publisher = await scene.start(1, PublishMode.FINISH, deadline_s=0.0)
    scene.client.on_wire = 1
    await publisher.begin(1, 1, "disk")
    with pytest.raises(EngineError, match="1 requests did not finish"):
        await publisher.end(end(1))
    assert scene.client.gate.is_set()
    assert scene.states() == ["serving"]


async def test_handles_go_to_each_engine_by_rank_and_the_last_one_carries_the_version(scene: Scene) -> None:
    publisher = await scene.start(2)
    await publisher.begin(2, 1, "tensor")
    urls = [engine.url for engine in scene.engines]
    for last in (False, True):
        await publisher.handles(HandlesBody({urls[0]: ["x"], urls[1]: ["y"]}, "flattened_bucket", last))
    bodies = [body for path, body in scene.engines[1].calls if path == "/update_weights_from_tensor"]
    plain = {"serialized_named_tensors": ["y"], "load_format": "flattened_bucket"}
    assert bodies == [
        {**plain, "flush_cache": False},
        {**plain, "flush_cache": True, "weight_version": "2"},
    ]
    report = await publisher.end(end(2, None))
    assert (report.calls, scene.engines[0].paths()[-2:]) == (2, ["/end_weight_update", "/continue_generation"])


async def test_parts_of_weights_that_were_given_up_never_serve(scene: Scene) -> None:
    publisher = await scene.start(1)
    await publisher.begin(2, 1, "tensor")
    await publisher.handles(HandlesBody({scene.engines[0].url: ["x"]}, "flattened_bucket", False))
    await publisher.cancel(2)
    assert scene.states() == ["quarantined"]
    assert scene.engines[0].paths()[-1] == "/continue_generation"
    await publisher.begin(3, 2, "disk")
    await publisher.end(end(3))
    assert scene.states() == ["serving"]


@pytest.mark.parametrize("culprit", ["dead", "refused", "frozen"])
async def test_who_broke_a_broadcast_is_left_out_and_who_was_caught_in_it_is_not(
    scene: Scene, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.server.publishing.groups.GRACE_S", 0.5)
    publisher = await scene.start(2)
    caught, bad = scene.engines
    caught.faults["/update_weights_from_distributed"] = None
    bad.faults["/update_weights_from_distributed"] = {"dead": 500, "refused": 400, "frozen": None}[culprit]
    await publisher.begin(1, 1, "distributed")
    await publisher.hold(1)
    telling = asyncio.create_task(publisher.announce(announce()))
    if culprit == "frozen":
        await caught.hanging.wait()
        caught.freed.set()  # the trainer's own timeout: it leaves
        assert list(await telling) == [caught.url]
    else:
        assert list(await telling) == [bad.url], "told at once, while the other one hangs"
        caught.freed.set()
    target = await publisher.leave("g")
    assert [worker.url for worker in target.workers] == [caught.url]
    assert scene.states() == ["serving", "quarantined"]
    assert caught.paths()[-2:] == ["/destroy_weights_update_group", "/end_weight_update"]
    caught.faults.clear()
    await publisher.hold(1)
    assert await publisher.announce(announce()) == {}
    report = await publisher.end(end(1, None))
    assert (report.serving, caught.version) == (1, "1")


async def test_handles_that_do_not_fit_the_engines_are_the_trainer_s_fault(scene: Scene) -> None:
    publisher = await scene.start(2)
    await publisher.begin(1, 1, "tensor")
    first, second = (engine.url for engine in scene.engines)
    for payloads in ({first: ["x"]}, {first: ["x"], second: ["x", "y"]}):
        with pytest.raises(SessionError, match=rf"payloads: {second} takes part and needs 1"):
            await publisher.handles(HandlesBody(payloads, "flattened_bucket", True))
    assert scene.states() == ["serving", "serving"]
    assert "/update_weights_from_tensor" not in scene.engines[0].paths()


async def test_the_canary_leaves_out_who_computes_otherwise(scene: Scene) -> None:
    publisher = await scene.start(1)
    close, far = (CanaryBody(1, [1, 2, 3], [-1.0, last]) for last in (-2.0005, -2.5))
    assert await publisher.canary(close) == {scene.engines[0].url: pytest.approx(5e-4)}
    with pytest.raises(EngineError, match=r"0\.5 off the trainer's, more than 0\.001"):
        await publisher.canary(far)


async def test_a_busy_engine_that_does_not_get_to_the_canary_is_not_accused(scene: Scene) -> None:
    publisher = await scene.start(2)
    scene.engines[0].faults["/generate"] = 503
    said = CanaryBody(1, [1, 2, 3], [-1.0, -2.0])
    assert await publisher.canary(said) == {scene.engines[1].url: 0.0}
    scene.engines[1].faults["/generate"] = 503
    assert await publisher.canary(said) == {}
    assert scene.states() == ["serving", "serving"]


def test_verdicts_of_what_engines_say() -> None:
    assert wrong_versions({"a": {"weight_version": "3"}, "b": {"weight_version": 2}, "c": {}}, 3).keys() == {"b", "c"}
    cpu = {"device": "cpu", "dtype": "float32", "quantization": None}
    assert comparable("sglang", {"a": cpu}, "float32")
    for other in ({"device": "cuda"}, {"dtype": "bfloat16"}, {"quantization": "fp8"}):
        assert not comparable("sglang", {"a": cpu | other}, "float32")
    assert (tolerance({"a": cpu}), tolerance({"a": cpu | {"dtype": "auto"}}), tolerance({})) == (1e-3, 0.2, 0.2)
    assert canary_gap({"meta_info": {"input_token_logprobs": [[None, 1], [float("nan"), 2]]}}, [-1.0]) == float("inf")
    assert canary_gap({"meta_info": {"input_token_logprobs": [[None, 1]]}}, [-1.0]) == float("inf")


def says(**sums: str) -> dict[str, Any]:
    return {"ranks": [{"checksums": sums}]}


def test_digests_are_compared_with_the_trainer_and_between_engines() -> None:
    good, bad = hashlib.sha256(b"1").hexdigest()[:16], "0" * 16
    wanted = {"w": (good, ())}
    assert wrong_digests({"a": says(w=good, x=good), "b": says(w=good, x=good)}, wanted) == {}
    assert wrong_digests({"a": says(w=good), "b": says(w=bad)}, wanted).keys() == {"b"}
    assert "missing" in wrong_digests({"a": says(x=good)}, wanted)["a"]
    three = {"a": says(w=good, x=good), "b": says(w=good, x=bad), "c": says(w=good, x=good)}
    assert wrong_digests(three, wanted) == {"b": "b has other weights than most engines: x"}
    assert wrong_digests({"a": {}}, wanted).keys() == {"a"}
    shapes = {"checksums": {"w": good}, "shapes": {"w": [2, 3]}}
    assert wrong_digests({"a": {"ranks": [shapes]}}, {"w": (good, (2, 3))}) == {}
    assert "shape [2, 3], not [3, 2]" in wrong_digests({"a": {"ranks": [shapes]}}, {"w": (good, (3, 2))})["a"]
    split = {"ranks": [{"checksums": {"w": good}}, {"checksums": {"w": bad}}]}
    assert wrong_digests({"a": split, "b": split}, wanted) == {}, "parts of a tensor are compared between engines alone"
