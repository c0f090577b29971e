"""Publishes of a real trainer's weights into real embedded engines, by every transport, and with an engine that dies in the middle."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import torch

from palestra.cli.engines.agent import FolderPuller
from palestra.server.client import ServiceClient, ServiceError
from palestra.server.engine_wire import version_of
from palestra.server.types import PublishMode
from palestra.server.weights_agent import WeightsListener
from palestra.trainer.config import WeightsConfig
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.publish import Publisher
from palestra.trainer.weights.deltaapply import LocalFolder
from palestra.trainer.weights.distributed import DistributedCarrier
from palestra.trainer.weights.handles import TensorCarrier
from tests.live import engine_process
from tests.publishing import PublishService
from tests.tiny import make_tiny_moe

pytestmark = pytest.mark.walk
BUCKET = 300_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> MegatronBackend:
    """A trainer with other weights than the engines start with."""
    return MegatronBackend.from_folder(make_tiny_moe(tmp_path_factory.mktemp("other"), seed=5))


@pytest.fixture(scope="module")
def same(model: Path) -> MegatronBackend:
    return MegatronBackend.from_folder(model)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[list[str]]:
    with engine_process(model) as first, engine_process(model) as second:
        yield [first, second]


def version_at(url: str) -> int:
    return version_of(httpx.get(f"{url}/model_info").json()["weight_version"])


@pytest.mark.parametrize("mode", list(PublishMode))
@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_weights_arrive_verified(
    engines: list[str],
    model: Path,
    same: MegatronBackend,
    other: MegatronBackend,
    transport: str,
    mode: PublishMode,
    tmp_path: Path,
) -> None:
    """Digests and the canary's logprobs are compared within `publish`: it would raise."""
    with PublishService(engines, mode=mode) as service:
        service.versions.highest = start = max(map(version_at, engines))
        settings = WeightsConfig(transport=transport, bucket_bytes=BUCKET)
        publisher = Publisher(service.client, settings, tmp_path, model)
        for version, backend in ((start + 1, other), (start + 2, same)):
            published = publisher.publish(backend, version, version)
            assert [version_at(url) for url in engines] == [version, version]
            assert published.bytes == sum(tensor.nbytes for _, tensor in backend.export())
            assert 0 < published.still_s <= published.seconds
        assert set(service.states.values()) == {"serving"}
        assert not service.engines.fleet.updating
        assert service.engines.salt == (f"w{start + 2}" if mode is PublishMode.IN_PLACE else None)


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_a_second_publish_computes_no_metadata(engines: list[str], other: MegatronBackend, transport: str) -> None:
    with PublishService(engines) as service:
        service.versions.highest = start = max(map(version_at, engines))
        carrier: TensorCarrier | DistributedCarrier
        carrier = (
            TensorCarrier(service.client, BUCKET)
            if transport == "tensor"
            else DistributedCarrier(service.client, BUCKET)
        )
        first = carrier.publish(other.export, start + 1, 1)
        stream = carrier.stream
        assert stream is not None
        assert stream.layout is not None
        buffers, bodies = [b.data_ptr() for b in stream.buffers], getattr(carrier, "bodies", 0)
        second = carrier.publish(other.export, start + 2, 2)
        assert first.requests == second.requests == len(stream.layout.buckets) > 3
        assert (stream.layouts, [b.data_ptr() for b in stream.buffers]) == (1, buffers)
        assert getattr(carrier, "bodies", 0) == bodies
        if isinstance(carrier, DistributedCarrier):
            carrier.close()


def test_wrong_digests_and_a_wrong_canary_are_found(engines: list[str], other: MegatronBackend) -> None:
    name = "model.norm.weight"

    class Lying:
        """Digests speak of another norm than the one sent."""

        def __init__(self, client: ServiceClient) -> None:
            self._client = client

        def __getattr__(self, call: str) -> Any:
            return getattr(self._client, call)

        def publish_end(self, version: int, path: str | None, *, digests: Any = None, dtype: str = "") -> Any:
            lies = {**digests, name: ("0" * 16, digests[name][1])}
            return self._client.publish_end(version, path, digests=lies, dtype=dtype)

    with PublishService(engines) as service:
        service.versions.highest = start = max(map(version_at, engines))
        with pytest.raises(ServiceError, match=f"other weights than the trainer: {name}"):
            TensorCarrier(Lying(service.client), BUCKET).publish(other.export, start + 1, 1)
        # They have weights that nobody vouches for.
        assert set(service.states.values()) == {"quarantined"}
        TensorCarrier(service.client, BUCKET).publish(other.export, start + 2, 2)
        assert set(service.states.values()) == {"serving"}, "late joiners are admitted at the end of a publish"
        with pytest.raises(ServiceError, match="no engine computes what the trainer does"):
            service.client.publish_canary(start + 2, [1, 2, 3], [-1.0, -1.0])


def test_an_engine_killed_in_a_broadcast_is_left_out(model: Path, other: MegatronBackend) -> None:
    """The others hang in the broadcast until the trainer leaves it; then all is sent again, without the dead one."""
    before = {child.pid for child in psutil.Process().children()}
    with engine_process(model) as second, engine_process(model) as first, PublishService([first, second]) as service:
        pid = min(child.pid for child in psutil.Process().children() if child.pid not in before)  # started first
        carrier = DistributedCarrier(service.client, BUCKET, timeout_s=20.0)
        passes: list[int] = []

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            passes.append(0)
            for pair in other.export():
                passes[-1] += 1
                if len(passes) == 2 and passes[-1] == 20:  # the first pass only measures
                    os.kill(pid, signal.SIGKILL)
                yield pair

        carrier.publish(export, 1, 1)
        assert len(passes) == 3, "everything is sent again"
        assert version_at(first) == 1
        assert service.states == {first: "serving", second: "quarantined"}
        group = carrier._group
        carrier.publish(other.export, 2, 2)
        assert carrier._group is group, "the group that stands is used again"
        carrier.close()


class Moved:
    """A backend one number of whose weights is another: the smallest of updates."""

    def __init__(self, backend: MegatronBackend, by: float) -> None:
        self._backend, self._by = backend, by

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(self._backend.export()):
            yield name, tensor + self._by * (torch.arange(tensor.numel()) == 0).view(tensor.shape) if i == 0 else tensor


def test_deltas_arrive_through_an_agent(engines: list[str], same: MegatronBackend, model: Path, tmp_path: Path) -> None:
    """A full folder, then a few changed bytes; an agent that lost all it had takes the base and what followed. Every publish is verified
    tensor by tensor."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    shared.mkdir()
    settings = WeightsConfig(mode="delta", shared_dir=shared, canary=False)
    with WeightsListener(FolderPuller(shared, LocalFolder(local, 2)), "127.0.0.1", 0, token="t") as listener:
        agents = dict.fromkeys(engines[:1], listener.url)
        with PublishService(engines[:1], agents=agents, agent_token="t") as service:
            publisher = Publisher(service.client, settings, tmp_path, model)
            sizes = [publisher.publish(Moved(same, by), version, version).bytes for version, by in ((1, 0.0), (2, 0.5))]
            shutil.rmtree(local)
            sizes.append(publisher.publish(Moved(same, 1.0), 3, 3).bytes)
            assert version_at(engines[0]) == 3
            assert service.states == {engines[0]: "serving"}
        assert sizes[0] > 100 * max(sizes[1:]), sizes
        with httpx.Client(headers={"Authorization": "Bearer t"}) as http:
            last = http.get(f"{listener.url}/status").json()["last"]
        assert (last["version"], last["from"]) == (3, "full"), "the base was fetched again"
