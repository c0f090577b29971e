"""Publishes for `benchmarks/weights.py`: a trainer's side over the model's weights, and the real publisher before two engines.

In: running engines. Out: what each publish took. Waits for the engines, each call with a deadline.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from safetensors.torch import load_file

from benchmarks.engines import Engines
from palestra.server.engine_wire import version_of
from palestra.trainer.weights.disk import DiskCarrier
from palestra.trainer.weights.distributed import DistributedCarrier
from palestra.trainer.weights.handles import TensorCarrier
from palestra.trainer.weights.types import Carrier, Published
from tests.publishing import PublishService


class Runs:
    """Weights that change from publish to publish; no optimizer is needed to see them travel."""

    def __init__(self, engines: Engines, bucket: int) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for path in sorted(engines.model.glob("*.safetensors")):
            self._tensors.update(load_file(path))
        self._service = PublishService(engines.urls, kind="sglang", deadline_s=120.0)
        self._folder = tempfile.TemporaryDirectory(dir=engines.home)
        self._version = max(_version_at(url) for url in engines.urls)
        self._carriers: dict[tuple[str, bool], Carrier] = {}
        self._model, self._bucket = engines.model, bucket

    def __enter__(self) -> Runs:
        self._service.__enter__()
        self._service.versions.highest = self._version
        return self

    def __exit__(self, *_: object) -> None:
        for carrier in self._carriers.values():
            if isinstance(carrier, DistributedCarrier):
                carrier.close()
        self._service.__exit__()
        self._folder.cleanup()

    def publish(self, transport: str, *, verify: bool) -> Published:
        """One publish of weights that differ from the last ones."""
        self._version += 1
        for tensor in self._tensors.values():
            tensor.mul_(1.0001)
        published = self._carrier(transport, verify=verify).publish(self._export, self._version, self._version)
        if "quarantined" in self._service.states.values():
            raise RuntimeError(f"an engine was left out: {self._service.publisher.last.left_out}")
        return published

    def generate(self, url: str, tokens: int) -> dict[str, Any]:
        """A request of so many tokens; what is said about it."""
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = httpx.post(f"{url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}, timeout=240)
        answer.raise_for_status()
        return dict(answer.json()["meta_info"])

    def memory_speed(self) -> float:
        """MB/s of copying the weights once, in memory."""
        flat = torch.cat([tensor.flatten() for tensor in self._tensors.values()])
        target = torch.empty_like(flat)
        speeds = []
        for _ in range(5):
            started = time.perf_counter()
            target.copy_(flat)
            speeds.append(flat.nbytes / 1e6 / (time.perf_counter() - started))
        return round(max(speeds), 1)

    def _export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def _carrier(self, transport: str, *, verify: bool) -> Carrier:
        key = transport, verify
        if key not in self._carriers:
            client = self._service.client
            if transport == "disk":
                self._carriers[key] = DiskCarrier(
                    client, Path(self._folder.name) / "w", self._model, self._bucket, verify=verify
                )
            elif transport == "tensor":
                self._carriers[key] = TensorCarrier(client, self._bucket, verify=verify)
            else:
                self._carriers[key] = DistributedCarrier(client, self._bucket, verify=verify, timeout_s=60.0)
        return self._carriers[key]


def _version_at(url: str) -> int:
    return version_of(httpx.get(f"{url}/model_info").json()["weight_version"])
