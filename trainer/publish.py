"""The data half of a publish: new weights for the engines. The service owns the control half and tells the engines when to load.

In: the backend's exported weights. Out: a Hugging Face folder `weights/vN` that engines read (disk), or safetensors bytes that the service
forwards (tensor). It waits for the service's answers, whose deadlines are the client's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from palestra.trainer.config import WeightsConfig
from palestra.trainer.durable import folder_aside, remove_unfinished
from palestra.trainer.types import Backend, RolloutService, TrainerError

Bucket = dict[str, torch.Tensor]
HEADER = 4096
"""Bytes left free in a bucket for safetensors' own header, by tensor name."""


class Publisher:
    """Brings the weights of one run to its engines."""

    def __init__(self, service: RolloutService, settings: WeightsConfig, run_dir: Path, model: Path) -> None:
        self._service, self._settings, self._model = service, settings, model
        self._root = run_dir / "weights"

    def publish(self, backend: Backend, version: int, train_step: int) -> None:
        """Makes the backend's present weights the engines' `version`; returns when the service says that it is so.

        Raises:
            TrainerError: the weights could not be written, or what was written reads back differently.
        """
        if self._settings.transport == "tensor":
            self._service.publish_begin(version, train_step)
            for bucket in buckets(backend.export(), self._settings.bucket_bytes):
                self._service.publish_bucket(save(bucket))
            self._service.publish_end(version, None)
            return
        folder = self._root / f"v{version}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._root)
            with folder_aside(folder, flush=False) as aside:
                self._write(backend, aside)
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"weights of version {version} could not be written to {folder}: {error}") from error
        # Engines pause between begin and end, so everything slow comes before.
        self._service.publish_begin(version, train_step)
        self._service.publish_end(version, str(folder))
        self._remove_all_but(version)

    def _write(self, backend: Backend, folder: Path) -> None:
        where: dict[str, str] = {}
        total = 0
        for i, bucket in enumerate(buckets(backend.export(), self._settings.bucket_bytes), start=1):
            name = f"model-{i:05d}.safetensors"
            save_file(bucket, str(folder / name), {"format": "pt"})
            if self._settings.verify == "checksum":
                _compare(bucket, folder / name)
            where.update(dict.fromkeys(bucket, name))
            total += sum(tensor.nbytes for tensor in bucket.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        _copy_about(self._model, folder)

    def _remove_all_but(self, version: int) -> None:
        for path in self._root.iterdir():
            if re.fullmatch(r"v\d+", path.name) and path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[Bucket]:
    """Groups tensors so that each group's bytes stay within `limit`; a tensor that is larger goes alone."""
    held: Bucket = {}
    size = 0
    for name, tensor in tensors:
        weighs = tensor.nbytes + HEADER
        if held and size + weighs > limit:
            yield held
            held, size = {}, 0
        held[name] = tensor.cpu()
        size += weighs
    if held:
        yield held


def _compare(bucket: Bucket, path: Path) -> None:
    with safe_open(str(path), framework="pt") as handle:
        for name, tensor in bucket.items():
            if not torch.equal(handle.get_tensor(name), tensor):
                raise TrainerError(f"{path}: {name} reads back differently from what was written")


def _copy_about(model: Path, folder: Path) -> None:
    """Configuration and tokenizer, so that the folder is a model of its own; the dtype is that of the tensors beside it."""
    for path in model.iterdir():
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
