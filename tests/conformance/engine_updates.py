"""The part of the engines' suite on new weights: by every way that they travel, whole, interrupted, and while requests run."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.engine_kit import DEADLINE_S, EngineUnderTest, Sampled, Sender, stored, wait_until


def halves(tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two buckets."""
    items = list(tensors.items())
    return dict(items[::2]), dict(items[1::2])


def unnamed() -> str:
    """A rid or group name that was never used."""
    return f"{random.getrandbits(128):032x}"


class UpdateSuite:
    """The tests. Each starts with the weights of `engine.folder` under a version of its own, `self.base`."""

    base: str
    pool: ThreadPoolExecutor
    _count = itertools.count()

    @pytest.fixture(autouse=True)
    def fresh(self, engine: EngineUnderTest) -> Iterator[None]:
        self.base = f"base-{next(self._count)}"
        engine.load(engine.folder, self.base)
        with ThreadPoolExecutor(64) as self.pool:
            yield
            engine.ask("/continue_generation")
            engine.ask("/abort_request", abort_all=True)
            engine.post("/end_weight_update")  # one that a failed test left open; 400 where there is none

    def start_long(self, engine: EngineUnderTest, prompt: list[int], rid: str) -> Future[Sampled]:
        """A long completion in the background, with at least 8 of its tokens sampled."""
        before = engine.progress()
        future = self.pool.submit(engine.generate, prompt, rid=rid, max_new_tokens=engine.long)
        wait_until(lambda: engine.progress() >= before + 8, "the first tokens")
        return future

    def check_in_force(self, engine: EngineUnderTest, version: str, prompt: list[int]) -> None:
        """The other weights are in force, and nothing that the old ones computed is used."""
        assert engine.version() == version
        after = engine.generate(prompt)
        assert after.meta["cached_tokens"] == 0
        assert after.spans == [(version, 0, 16)]
        assert after.gap(engine.other) < engine.tolerance

    def check_crossed(self, engine: EngineUnderTest, sampled: Sampled, version: str) -> None:
        """A request that was retracted in the middle goes on as a full recompute with the other weights."""
        assert [name for name, _, _ in sampled.spans] == [self.base, version]
        swap = sampled.spans[1][1]
        assert len(sampled.ids) == engine.long
        assert sampled.gap(engine.folder, end=swap) < engine.tolerance
        assert sampled.gap(engine.other, start=swap) < engine.tolerance

    @pytest.mark.parametrize("flattened", [False, True], ids=["one by one", "flattened"])
    def test_weights_by_broadcast(self, engine: EngineUnderTest, flattened: bool) -> None:
        prompt = engine.prompt(80, 64)
        engine.generate(prompt)
        sender = Sender(engine, self.pool, f"group-{unnamed()}")
        running = self.start_long(engine, engine.prompt(81), unnamed())
        engine.ask("/pause_generation", mode="retract")
        engine.ask("/begin_weight_update")
        first, last = halves(stored(engine.other))
        assert sender.send(first, flattened=flattened, flush_cache=False).status_code == 200
        answer = sender.send(last, flattened=flattened, flush_cache=True, weight_version="sent")
        assert answer.status_code == 200, answer.text
        engine.ask("/end_weight_update")
        engine.ask("/continue_generation")
        self.check_in_force(engine, "sent", prompt)
        self.check_crossed(engine, running.result(DEADLINE_S), "sent")
        engine.ask("/destroy_weights_update_group", group_name=sender.name)
        assert engine.post("/destroy_weights_update_group", group_name=sender.name).status_code == 400
        sender.abort()

    def test_weights_by_tensor(self, engine: EngineUnderTest) -> None:
        prompt, whole = engine.prompt(82, 64), stored(engine.other)
        assert engine.payloads
        for way, payload in engine.payloads.items():
            engine.load(engine.folder, f"again-{way}")
            engine.generate(prompt)
            engine.ask("/pause_generation", mode="retract")
            engine.ask("/begin_weight_update")
            first, last = halves(whole)
            engine.ask("/update_weights_from_tensor", flush_cache=False, **payload(first))
            engine.ask("/update_weights_from_tensor", flush_cache=True, weight_version=way, **payload(last))
            engine.ask("/end_weight_update")
            engine.ask("/continue_generation")
            self.check_in_force(engine, way, prompt)

    def test_weights_by_disk(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(83, 64)
        engine.generate(prompt)
        running = self.start_long(engine, engine.prompt(84), unnamed())
        engine.ask("/pause_generation", mode="retract")
        engine.load(engine.other, "disk")
        engine.ask("/continue_generation")
        self.check_in_force(engine, "disk", prompt)
        self.check_crossed(engine, running.result(DEADLINE_S), "disk")

    def test_an_engine_that_was_drained_mixes_no_versions(self, engine: EngineUnderTest) -> None:
        """What the client's `finish` stands on: when all are answered nothing runs, and whoever waits through the update sees only it."""
        done = list(self.pool.map(engine.generate, [engine.prompt(85 + n) for n in range(8)]))
        assert {tuple(sampled.spans) for sampled in done} == {((self.base, 0, 16),)}
        wait_until(lambda: engine.metric("num_running_reqs") == 0, "nothing to run")
        assert engine.metric("num_queue_reqs") == 0
        engine.ask("/pause_generation", mode="retract")
        waiting = [self.pool.submit(engine.generate, engine.prompt(85 + n)) for n in range(8)]
        engine.wait_for_queued(8)
        engine.load(engine.other, "drained")
        engine.ask("/continue_generation")
        later = [future.result(DEADLINE_S) for future in waiting]
        assert {tuple(sampled.spans) for sampled in later} == {(("drained", 0, 16),)}
        assert max(sampled.gap(engine.other) for sampled in later) < engine.tolerance

    def test_a_flush_beside_frozen_requests(self, engine: EngineUnderTest) -> None:
        """It cannot take what they hold. An engine that refuses it has the new weights all the same, and keeps their version to itself."""
        running = self.start_long(engine, engine.prompt(94), unnamed())
        engine.ask("/pause_generation", mode="in_place")
        update = {"model_path": str(engine.other), "weight_version": "frozen", "flush_cache": True}
        assert engine.post("/update_weights_from_disk", **update).status_code == engine.frozen_flush
        assert engine.version() == ("frozen" if engine.frozen_flush == 200 else self.base)
        engine.ask("/continue_generation")
        assert [name for name, _, _ in running.result(DEADLINE_S).spans] == [self.base, "frozen"]
        assert engine.generate(engine.prompt(93)).gap(engine.other) < engine.tolerance

    def test_checksums_tell_one_changed_tensor(self, engine: EngineUnderTest) -> None:
        before, whole = engine.checksums(), stored(engine.folder)
        raw = whole[engine.single].contiguous().numpy().tobytes()
        assert before[engine.single] == hashlib.sha256(raw).hexdigest()[:16]
        assert engine.checksums() == before
        whole[engine.single].view(-1)[3] += 0.5
        payload = next(iter(engine.payloads.values()))
        engine.ask("/pause_generation", mode="retract")
        engine.ask("/begin_weight_update")
        engine.ask("/update_weights_from_tensor", flush_cache=True, weight_version="bent", **payload(whole))
        engine.ask("/end_weight_update")
        engine.ask("/continue_generation")
        after = engine.checksums()
        assert [name for name in before if before[name] != after[name]] == [engine.single]

    def test_an_interrupted_broadcast_can_be_done_again(self, engine: EngineUnderTest) -> None:
        """Rank 0 sends one bucket, announces another, and is gone."""
        prompt = engine.prompt(95, 64)
        first, last = halves(stored(engine.other))
        sender = Sender(engine, self.pool, f"cut-{unnamed()}")
        engine.ask("/pause_generation", mode="retract")
        engine.ask("/begin_weight_update")
        assert sender.send(first, flattened=True, flush_cache=False).status_code == 200
        left = sender.announce(last, flattened=True, flush_cache=True, weight_version="never")
        sender.abort()
        assert left.result(DEADLINE_S).status_code == 400
        engine.post("/destroy_weights_update_group", group_name=sender.name)
        ended = engine.post("/end_weight_update")
        assert engine.version() == self.base
        engine.ask("/continue_generation")
        if engine.staged:
            assert ended.status_code == 400
            assert engine.generate(prompt).gap(engine.folder) < engine.tolerance, "half an update shows"
        again = Sender(engine, self.pool, f"again-{unnamed()}")
        engine.ask("/pause_generation", mode="retract")
        engine.ask("/begin_weight_update")
        for bucket, more in ((first, {"flush_cache": False}), (last, {"flush_cache": True, "weight_version": "whole"})):
            assert again.send(bucket, flattened=True, **more).status_code == 200
        engine.ask("/end_weight_update")
        engine.ask("/continue_generation")
        self.check_in_force(engine, "whole", prompt)
        engine.ask("/destroy_weights_update_group", group_name=again.name)
        again.abort()

    def test_buckets_outside_an_update_are_refused(self, engine: EngineUnderTest) -> None:
        body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
        answer = engine.post("/update_weights_from_distributed", **body)
        assert answer.status_code == 400
        assert "begin_weight_update" in answer.text
        assert engine.version() == self.base
