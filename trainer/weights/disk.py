"""Weights by folder: a Hugging Face folder of sharded safetensors that engines read.

In: the backend's weights. Out: `vN` below the root, there whole or not at all, and engines that have loaded it. Engines stand still only
from the service's word to load, so everything slow comes before. The folder before is removed once the new one is in force.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from palestra.trainer.durable import folder_aside, remove_unfinished
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.proof import Proof
from palestra.trainer.weights.types import Export, FolderService, Published

Bucket = dict[str, torch.Tensor]
HEADER = 4096
"""Bytes left free in a file for safetensors' own header, by tensor name."""


class DiskCarrier:
    """See `Carrier`."""

    def __init__(
        self, service: FolderService, root: Path, model: Path, bucket_bytes: int, *, verify: bool = True
    ) -> None:
        """`root`: where the folders are written; `model`: whose configuration and tokenizer they get."""
        self._service, self._root, self._model = service, root, model
        self._bucket_bytes, self._verify = bucket_bytes, verify

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """See `Carrier`."""
        started = time.monotonic()
        folder = self._root / f"v{version}"
        proof = Proof(self._service.publish_target().kind if self._verify else None)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._root)
            with folder_aside(folder, flush=False) as aside:
                total = write_folder(export, aside, self._model, self._bucket_bytes, proof)
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"weights of version {version} could not be written to {folder}: {error}") from error
        self._service.publish_begin(version, train_step, "disk")
        report = self._service.publish_end(version, str(folder), digests=proof.digests(), dtype=proof.dtype)
        self._remove_all_but(version)
        return Published(total, time.monotonic() - started, report.still_s, report.calls)

    def _remove_all_but(self, version: int) -> None:
        for path in self._root.iterdir():
            if re.fullmatch(r"v\d+", path.name) and path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)


def write_folder(export: Export, folder: Path, model: Path, bucket_bytes: int, proof: Proof | None = None) -> int:
    """Writes weights, with the configuration and tokenizer of `model`, into an empty folder; returns their bytes. With a `proof` that
    collects, each file is read back and compared.

    Raises:
        TrainerError: a file reads back differently.
        OSError, SafetensorError: it could not be written.
    """
    where: dict[str, str] = {}
    total = 0
    dtypes: set[str] = set()
    for i, bucket in enumerate(buckets(export(), bucket_bytes), start=1):
        name = f"model-{i:05d}.safetensors"
        save_file(bucket, str(folder / name), {"format": "pt"})
        if proof is not None and proof.collects:
            _compare(bucket, folder / name)
            for key, tensor in bucket.items():
                proof.watch(key, tensor)
        where.update(dict.fromkeys(bucket, name))
        total += sum(tensor.nbytes for tensor in bucket.values())
        dtypes.update(str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    _copy_about(model, folder, dtypes)
    return total


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


def _copy_about(model: Path, folder: Path, dtypes: set[str]) -> None:
    """Configuration and tokenizer, so that the folder is a model of its own; the dtype is that of the tensors beside it."""
    for path in model.iterdir():
        if path.suffix in {".json", ".jinja", ".model", ".txt"} and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = next(iter(dtypes))
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
