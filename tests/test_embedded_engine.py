"""The embedded engine in a process of its own, over HTTP: the suite for all engines, and what is its own."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.conformance.engine import ChecksIds, EngineSuite
from tests.conformance.engine_kit import DEADLINE_S, LONG, EngineUnderTest, reference, stored, wait_until
from tests.embedded import PAGE, SEGMENTS, WINDOW, blob, damaged, serve, split

pytestmark = pytest.mark.walk


class TestMoe(ChecksIds, EngineSuite):
    """The common suite, and what the embedded engine does beyond it."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
        yield from serve("moe", tmp_path_factory.mktemp("moe"))

    def test_a_fresh_engine_is_described(self, engine: EngineUnderTest) -> None:
        info = engine.get("/model_info")
        assert info["vocab_size"] == engine.vocab_size
        assert info["context_length"] == WINDOW
        assert info["is_generation"] is True
        assert info["weight_version"] == self.base
        assert info["model_path"] == str(engine.folder)

    def test_forced_ids_keep_the_models_logprobs(self, engine: EngineUnderTest) -> None:
        wanted = engine.prompt(20, 12)
        sampled = engine.generate(engine.prompt(21), max_new_tokens=20, more={"forced_ids": wanted})
        assert sampled.ids[:12] == wanted
        assert len(sampled.ids) == 20
        assert sampled.gap(engine.folder) < engine.tolerance
        stopped = engine.generate(
            engine.prompt(21), stop_token_ids=[wanted[-1]], ignore_eos=False, more={"forced_ids": wanted}
        )
        assert stopped.ids == wanted[: wanted.index(wanted[-1]) + 1]
        assert stopped.reason == "stop"

    def test_the_models_own_end_token_stops(self, engine: EngineUnderTest) -> None:
        end = json.loads((engine.folder / "config.json").read_text())["eos_token_id"]
        forced = {"forced_ids": [11, end, 12]}
        assert engine.generate(engine.prompt(22), ignore_eos=False, more=forced).ids == [11, end]
        assert engine.generate(engine.prompt(22), ignore_eos=True, more=forced).ids[:3] == [11, end, 12]

    def test_seeds_repeat_and_survive_a_resumption(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(23)
        whole = engine.generate(prompt, sampling_seed=7, max_new_tokens=24)
        assert engine.generate(prompt, sampling_seed=7, max_new_tokens=24).ids == whole.ids
        assert engine.generate(prompt, sampling_seed=8, max_new_tokens=24).ids != whole.ids
        rest = engine.generate([*prompt, *whole.ids[:10]], sampling_seed=7, max_new_tokens=14)
        assert rest.ids == whole.ids[10:]

    def test_greedy(self, engine: EngineUnderTest) -> None:
        sampled = engine.generate(engine.prompt(24), temperature=0, max_new_tokens=8)
        assert sampled.ids == engine.generate(engine.prompt(24), temperature=0, max_new_tokens=8).ids
        assert sampled.gap(engine.folder) < engine.tolerance

    @pytest.mark.parametrize(
        ("field", "body"),
        [
            ("n", {"sampling_params": {"n": 2}}),
            ("stop_regex", {"sampling_params": {"stop_regex": "a+"}}),
            ("stream", {"stream": True}),
            ("lora_path", {"lora_path": "x"}),
            ("input_ids", {"input_ids": []}),
            ("vocabulary", {"input_ids": [10**6]}),
            ("max_new_tokens", {"sampling_params": {"max_new_tokens": -1}}),
        ],
    )
    def test_what_is_not_built_is_refused_by_name(
        self, engine: EngineUnderTest, field: str, body: dict[str, Any]
    ) -> None:
        answer = engine.post("/generate", **{"input_ids": [10, 11], **body})
        assert answer.status_code == 400
        assert field in answer.json()["message"]

    def test_a_completion_is_cut_to_the_window(self, engine: EngineUnderTest) -> None:
        sampled = engine.generate(engine.prompt(25, WINDOW - 5), max_new_tokens=400)
        assert len(sampled.ids) == 5
        assert sampled.reason == "length"
        assert sampled.gap(engine.folder) < engine.tolerance

    def test_abort_of_a_queued_request_keeps_its_tokens(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(26), "retracted")
        engine.ask("/pause_generation", mode="retract")
        fresh = self.pool.submit(engine.generate, engine.prompt(27), rid="fresh")
        engine.wait_for_queued(2)
        assert engine.metric("num_running_reqs") == 0
        assert engine.ask("/abort_request", rid="retracted")["aborted"] == 1
        sampled = future.result(DEADLINE_S)
        assert sampled.reason == "abort"
        assert len(sampled.ids) >= 8
        assert sampled.gap(engine.folder) < engine.tolerance
        assert engine.ask("/abort_request", abort_all=True)["aborted"] == 1
        assert fresh.result(DEADLINE_S).ids == []

    def test_an_update_without_a_pause_retracts_by_itself(self, engine: EngineUnderTest) -> None:
        future = self.start_long(engine, engine.prompt(28), "moving")
        engine.load(engine.other, "other")
        sampled = future.result(DEADLINE_S)
        swap = sampled.spans[1][1]
        assert len(sampled.ids) == LONG
        assert sampled.gap(engine.folder, end=swap) < engine.tolerance
        assert sampled.gap(engine.other, start=swap) < engine.tolerance

    def test_frozen_requests_leave_no_old_cache_behind(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(29, 64)
        future = self.start_long(engine, prompt, "frozen")
        engine.ask("/pause_generation", mode="in_place")
        engine.ask("/update_weights_from_disk", model_path=str(engine.other), weight_version="other", flush_cache=False)
        engine.ask("/continue_generation")
        mixed = future.result(DEADLINE_S)
        again = engine.generate([*prompt, *mixed.ids[:64]])
        assert again.gap(engine.other) < engine.tolerance

    def test_flush_cache(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(30, 64)
        engine.generate(prompt)
        assert engine.generate(prompt).meta["cached_tokens"] > 0
        engine.ask("/flush_cache")
        assert engine.generate(prompt).meta["cached_tokens"] == 0
        assert engine.generate(prompt, more={"extra_key": "apart"}).meta["cached_tokens"] == 0

    def test_siblings_that_arrive_together_read_the_prompt_once(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(31, 1200)  # more than one step reads
        done = list(self.pool.map(lambda _: engine.generate(prompt, max_new_tokens=4), range(8)))
        assert sorted(sampled.meta["cached_tokens"] for sampled in done) == [0] + [1200 - PAGE] * 7
        assert max(sampled.gap(engine.folder) for sampled in done) < engine.tolerance

    @pytest.mark.parametrize("damage", ["shape", "missing", "unknown", "nan", "truncated", "empty"])
    def test_bad_weights_leave_the_old_ones(self, engine: EngineUnderTest, damage: str, tmp_path: Path) -> None:
        bad = damaged(engine.other, tmp_path / "bad", damage)
        answer = engine.post("/update_weights_from_disk", model_path=str(bad), weight_version="bad")
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        sampled = engine.generate(engine.prompt(32))
        assert sampled.spans == [(self.base, 0, 16)]
        assert sampled.gap(engine.folder) < engine.tolerance

    def test_weights_by_value_in_buckets(self, engine: EngineUnderTest) -> None:
        buckets = split(engine.other, 3)
        engine.ask("/begin_weight_update")
        for bucket in buckets[:-1]:
            engine.ask("/update_weights_from_tensor", serialized_named_tensors=[bucket], load_format="safetensors")
        assert engine.generate(engine.prompt(33)).gap(engine.folder) < engine.tolerance, "nothing shows before the end"
        refused = engine.post("/end_weight_update", weight_version="half")
        assert refused.status_code == 400
        assert "missing" in refused.text
        engine.ask("/begin_weight_update")
        for bucket in buckets:
            engine.ask("/update_weights_from_tensor", serialized_named_tensors=[bucket], load_format="safetensors")
        engine.ask("/end_weight_update", weight_version="buckets")
        sampled = engine.generate(engine.prompt(33))
        assert sampled.spans == [("buckets", 0, 16)]
        assert sampled.gap(engine.other) < engine.tolerance

    def test_damaged_buckets_and_nameless_versions_are_refused(self, engine: EngineUnderTest) -> None:
        for blobs, version in ((["AAAA"], "v"), (["no base64!"], "v"), (split(engine.other, 1), None)):
            body = {"serialized_named_tensors": blobs, "load_format": "safetensors", "weight_version": version}
            assert engine.post("/update_weights_from_tensor", **body).status_code == 400
        assert engine.post("/end_weight_update", weight_version="v").status_code == 400
        assert engine.generate(engine.prompt(34)).spans == [(self.base, 0, 16)]

    def test_a_client_that_has_gone_is_dropped(self, engine: EngineUnderTest) -> None:
        before = engine.progress()
        body = json.dumps(
            {"input_ids": engine.prompt(35), "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
        )
        address = urlsplit(engine.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: engine.progress() >= before + 8, "the first tokens")
        wait_until(lambda: engine.metric("num_running_reqs") == 0, "the request to be dropped")
        assert engine.progress() < before + LONG

    def test_one_rid_once(self, engine: EngineUnderTest) -> None:
        self.start_long(engine, engine.prompt(36), "twin")
        answer = engine.post("/generate", input_ids=[10], rid="twin")
        assert answer.status_code == 400
        assert "twin" in answer.text

    def test_routed_experts_are_the_routers(self, engine: EngineUnderTest) -> None:
        prompt = engine.prompt(40, 50)
        engine.generate(prompt)  # the next one takes its first pages from the store
        sampled = engine.generate(prompt, more={"return_routed_experts": True})
        assert sampled.meta["cached_tokens"] > 0
        assert (experts(sampled.meta) == routed(engine.folder, prompt + sampled.ids)).all()

    def test_a_retracted_request_has_each_tokens_experts_once(self, engine: EngineUnderTest) -> None:
        before = engine.progress()
        prompt, more = engine.prompt(41, 50), {"return_routed_experts": True}
        future = self.pool.submit(engine.generate, prompt, max_new_tokens=400, more=more)
        wait_until(lambda: engine.progress() >= before + 8, "the first tokens")
        engine.load(engine.other, "other")
        sampled = future.result(DEADLINE_S)
        assert len(sampled.spans) == 2
        found = experts(sampled.meta)
        assert found.shape == (50 + 400 - 1, 2, 2)
        assert (found == routed(engine.other, prompt + sampled.ids)).all()


class TestLlama(ChecksIds, EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
        yield from serve("llama", tmp_path_factory.mktemp("llama"))

    def test_routed_experts_of_a_dense_model_are_refused(self, engine: EngineUnderTest) -> None:
        answer = engine.post("/generate", input_ids=[10], return_routed_experts=True)
        assert answer.status_code == 400
        assert "experts" in answer.text

    def test_tied_weights_must_agree(self, engine: EngineUnderTest) -> None:
        import torch

        tensors = stored(engine.folder)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        body = {"load_format": "safetensors", "weight_version": "tied"}
        engine.ask("/update_weights_from_tensor", serialized_named_tensors=[blob(tensors)], **body)
        tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
        assert (
            engine.post("/update_weights_from_tensor", serialized_named_tensors=[blob(tensors)], **body).status_code
            == 400
        )


@pytest.fixture(scope="module", autouse=True)
def segments_go() -> Iterator[None]:
    """They are the sender's, and are still there when the engine has ended."""
    yield
    while SEGMENTS:
        segment = SEGMENTS.pop()
        assert Path("/dev/shm", segment.name).exists()
        segment.close()
        segment.unlink()


def experts(meta: dict[str, Any]) -> Any:
    raw = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int16)
    return raw.reshape(meta["routed_experts_shape"])


def routed(folder: Path, ids: list[int]) -> Any:
    """[len(ids) - 1, layers, top-k] as transformers' routers pick them."""
    import torch

    picked: list[torch.Tensor] = []
    model = reference(folder)
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: picked.append(out[-1])) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(picked, 1).numpy()
