"""A model of 61 layers with 256 experts each, tiny but with all of its 47 thousand tensors, published into a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from palestra.server.engine_wire import version_of
from palestra.trainer.weights.distributed import DistributedCarrier
from palestra.trainer.weights.handles import TensorCarrier
from tests.live import engine_process
from tests.publishing import PublishService
from tests.tiny import make_tiny_moe

LAYERS, EXPERTS = 61, 256
BUCKET = 4 * 2**20
TENSORS = LAYERS * EXPERTS * 3
SLACK = 64 * 2**20
"""Memory of the process that comes and goes for reasons of its own."""


SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("many"), num_hidden_layers=LAYERS, **SHAPE)


@pytest.fixture(scope="module")
def tensors(model: Path) -> dict[str, torch.Tensor]:
    found = read(model)
    assert sum(".experts." in name for name in found) == TENSORS
    return found


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[str]:
    with engine_process(model, "--context-length", "64") as url:
        yield url


def changed(tensors: dict[str, torch.Tensor], by: float) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        yield name, tensor + by


@pytest.mark.walk
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", [TensorCarrier, DistributedCarrier])
def test_few_requests_and_no_metadata_the_second_time(
    engine: str,
    tensors: dict[str, torch.Tensor],
    way: type[TensorCarrier] | type[DistributedCarrier],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with PublishService([engine], deadline_s=120.0) as service:
        service.versions.highest = version_of(httpx.get(f"{engine}/model_info").json()["weight_version"])
        carrier = way(service.client, BUCKET, verify=False)
        base, process = service.versions.highest, psutil.Process()
        first = carrier.publish(lambda: changed(tensors, 0.01), base + 1, 1)
        held = process.memory_info().rss
        second = carrier.publish(lambda: changed(tensors, 0.02), base + 2, 2)
        grown = process.memory_info().rss - held
        layout = carrier.stream.layout
        assert layout is not None
        buckets = len(layout.buckets)
        assert [first.requests, second.requests] <= [buckets, buckets]
        assert buckets <= layout.nbytes / BUCKET + 2
        assert carrier.stream.layouts == 1, "the second publish computes no metadata"
        if isinstance(carrier, DistributedCarrier):
            assert carrier.bodies == buckets
            carrier.close()
        assert sum(buffer.nbytes for buffer in carrier.stream.buffers) <= 2 * BUCKET
        assert grown < 2 * BUCKET + SLACK
        assert service.states == {engine: "serving"}
        with capsys.disabled():
            print(
                f"\n  {len(tensors):,} tensors, {buckets} buckets: {second.seconds:.1f} s, {second.still_s:.1f} s still"
            )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_merged_against_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four of the layers by broadcast: in buckets, and with a request for each tensor, which for all 61 takes more than half an hour."""
    folder = make_tiny_moe(tmp_path, num_hidden_layers=4, **SHAPE)
    tensors = read(folder)
    seconds = []
    with engine_process(folder, "--context-length", "64") as url, PublishService([url], deadline_s=600.0) as service:
        service.versions.highest = 0
        for limit in (BUCKET, 1):
            carrier = DistributedCarrier(service.client, limit, verify=False)
            carrier.publish(lambda: changed(tensors, 0.01), service.versions.highest + 1, 1)
            done = carrier.publish(lambda: changed(tensors, 0.02), service.versions.highest + 1, 2)
            seconds.append(done.seconds)
            carrier.close()
        assert done.requests == len(tensors)
    with capsys.disabled():
        print(f"\n  {len(tensors):,} tensors: merged {seconds[0]:.2f} s, one by one {seconds[1]:.2f} s")
    assert seconds[0] < seconds[1]
