"""Publishes into two real SGLang engines: every transport, with requests in flight, and an engine killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import torch

from palestra.server.engine_wire import version_of
from palestra.server.types import PublishMode
from palestra.trainer.config import WeightsConfig
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.publish import Publisher
from palestra.trainer.weights.distributed import DistributedCarrier
from tests.publishing import PublishService
from tests.sglang import SglangEngines

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]
BUCKET = 400_000
TOKENS = 300


@pytest.fixture
def workers(sglang_engines: SglangEngines) -> tuple[str, ...]:
    """Both engines, with the weights that they were started with."""
    return sglang_engines.fresh()


@pytest.fixture(scope="module")
def backends(sglang_engines: SglangEngines) -> list[MegatronBackend]:
    """Weights to publish in turn."""
    return [MegatronBackend.from_folder(folder) for folder in (sglang_engines.other, sglang_engines.folder)]


def version_at(url: str) -> int:
    return version_of(httpx.get(f"{url}/model_info").json()["weight_version"])


def generate(url: str) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["meta_info"])


@pytest.mark.parametrize("mode", [PublishMode.RETRACT, PublishMode.IN_PLACE])
@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_weights_arrive_verified_and_requests_in_flight_survive(
    workers: tuple[str, ...],
    sglang_engines: SglangEngines,
    backends: list[MegatronBackend],
    transport: str,
    mode: PublishMode,
    tmp_path: Path,
) -> None:
    """Digests of all tensors and the canary's logprobs are compared within `publish`: it would raise, or leave an engine out."""
    with PublishService(workers, kind="sglang", mode=mode) as service, ThreadPoolExecutor(8) as pool:
        service.versions.highest = 0
        settings = WeightsConfig(transport=transport, bucket_bytes=BUCKET)
        publisher = Publisher(service.client, settings, tmp_path, sglang_engines.folder)
        publisher.publish(backends[0], 1, 1)
        flights = [pool.submit(generate, worker) for worker in workers for _ in range(4)]
        publisher.publish(backends[1], 2, 2)
        assert [version_at(worker) for worker in workers] == [2, 2]
        assert set(service.states.values()) == {"serving"}
        for meta in (flight.result() for flight in flights):
            assert meta["completion_tokens"] == TOKENS
            spans = [(span["start"], span["end"]) for span in meta["weight_versions"]]
            assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
            assert spans[-1][1] == TOKENS
            versions = [version_of(span["version"]) for span in meta["weight_versions"]]
            assert versions == sorted(set(versions))
            assert set(versions) <= {1, 2}


def test_an_engine_killed_in_a_broadcast_is_left_out(
    workers: tuple[str, ...], sglang_engines: SglangEngines, backends: list[MegatronBackend]
) -> None:
    """The other one hangs in the broadcast until the trainer leaves it; then all is sent again, without the dead one."""
    names = sorted(name for name in sglang_engines.pids() if name.startswith("engine"))
    victim, survivor = workers
    with PublishService(workers, kind="sglang") as service:
        service.versions.highest = 0
        carrier = DistributedCarrier(service.client, BUCKET)
        carrier.publish(backends[0].export, 1, 1)
        passes: list[int] = []

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            passes.append(0)
            for pair in backends[1].export():
                passes[-1] += 1
                if len(passes) == 1 and passes[-1] == 20:
                    first = psutil.Process(sglang_engines.pids()[names[0]])
                    for process in (*first.children(recursive=True), first):
                        os.kill(process.pid, signal.SIGKILL)
                yield pair

        carrier.publish(export, 2, 2)
        assert len(passes) == 2, "everything is sent again"
        assert service.states == {victim: "quarantined", survivor: "serving"}
        assert version_at(survivor) == 2
        carrier.close()
