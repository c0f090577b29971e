"""The data half of a publish: new weights for the engines, by the transport of the run. The service owns the control half.

In: a backend. Out: engines that serve its weights under a new version, and what that took. It waits for the service's answers, whose
deadlines are the client's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palestra.trainer.config import WeightsConfig
from palestra.trainer.types import Backend, RolloutService, TrainerError
from palestra.trainer.weights.canary import canary_ids, canary_logprobs
from palestra.trainer.weights.delta import DeltaCarrier, DeltaFolder
from palestra.trainer.weights.disk import DiskCarrier, write_folder
from palestra.trainer.weights.distributed import DistributedCarrier
from palestra.trainer.weights.handles import TensorCarrier
from palestra.trainer.weights.quantised import quantised
from palestra.trainer.weights.types import Carrier, Export, Published


class Publisher:
    """Brings the weights of one run to its engines."""

    def __init__(self, service: RolloutService, settings: WeightsConfig, run_dir: Path, model: Path) -> None:
        self._service, self._settings = service, settings
        engines = settings.engine_model or model
        self._carrier = choose_carrier(service, settings, run_dir, engines)
        config = _config_of(engines)
        self._vocab = int(config["vocab_size"])
        self._form: dict[str, Any] | None = config.get("quantization_config")

    def publish(self, backend: Backend, version: int, train_step: int) -> Published:
        """Makes the backend's present weights the engines' `version`; returns when the service says that it is so, and that engines
        compute with them what the backend does.

        Raises:
            TrainerError: the weights could not be written or sent, or what was written reads back differently.
        """
        export = backend.export if self._form is None else quantised(backend.export, self._form)
        published = self._carrier.publish(export, version, train_step)
        if self._settings.canary:
            ids = canary_ids(self._vocab)
            self._service.publish_canary(version, ids, canary_logprobs(backend, ids))
        return published


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path}: the engines' model cannot be read: {error}") from None


def choose_carrier(service: RolloutService, settings: WeightsConfig, run_dir: Path, model: Path) -> Carrier:
    """The transport that the configuration asks for; `model` is the engines' folder."""
    size, verify = settings.bucket_bytes, settings.verify == "checksum"
    shared = settings.shared_dir or run_dir / "weights"
    if settings.transport == "tensor":
        return TensorCarrier(service, size, verify=verify)
    if settings.transport == "distributed":
        return DistributedCarrier(service, size, verify=verify)
    if settings.mode == "delta":

        def write(export: Export, folder: Path) -> None:
            write_folder(export, folder, model, size)

        folder = DeltaFolder(shared, write, encoding=settings.delta_encoding, base_every=settings.base_every)
        return DeltaCarrier(service, folder, verify=verify)
    return DiskCarrier(service, shared, model, size, verify=verify)


def figures(published: Published) -> dict[str, float]:
    """What a publish took, as metrics."""
    megabytes = published.bytes / 1e6
    return {
        "weights/bytes/sum": float(published.bytes),
        "weights/seconds/mean": published.seconds,
        "weights/mb_per_s/mean": megabytes / max(published.seconds, 1e-9),
        "weights/requests/count": float(published.requests),
    }
