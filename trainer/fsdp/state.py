"""Checkpoints of the sharded backend, in the very form of megatron's (`trainer/megatron/state.py`): each can read the other's.

Weights, both Adam moments and the KL reference, all under Hugging Face names. Rank 0 writes; every rank reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from palestra.trainer.checkpoints import model_fingerprint
from palestra.trainer.durable import sync_file
from palestra.trainer.fsdp import names
from palestra.trainer.megatron import state as megatron_form
from palestra.trainer.megatron.families import Architecture, architecture_of, read_config
from palestra.trainer.types import CheckpointError, ModelError

Tensors = Mapping[str, torch.Tensor]
"""By transformers' parameter names; sharded."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model that megatron's backend does not know: its checkpoints are for this one alone."""

    family: str
    fingerprint: str
    """Of config.json."""


def identity_of(folder: Path) -> Architecture | OtherModel:
    """What a checkpoint says it is of.

    Raises:
        ModelError: the folder has no readable config.json.
    """
    config = read_config(folder)
    try:
        return architecture_of(config)
    except ModelError:  # megatron's backend does not know it, transformers does
        return OtherModel(str(config.get("model_type")), model_fingerprint(folder))


def write(
    folder: Path, model: Any, identity: Architecture | OtherModel, files: Mapping[str, Tensors], steps: int
) -> None:
    """Writes each file's tensors and what they are of, durably. All ranks call it; none returns before rank 0 is done.

    Raises:
        CheckpointError: the disk refused.
    """
    writes = dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        named = {}
        for key, value in names.exported(model, tensors):
            if writes:
                named[key] = value.cpu()
        if writes:
            try:
                save_file(named, str(folder / name), {"format": "pt"})
            except SafetensorError as error:  # how safetensors reports a full disk
                raise CheckpointError(f"{folder / name} could not be written: {error}") from error
            sync_file(folder / name)
    if writes:
        about = {
            "format": 1,
            "architecture": dataclasses.asdict(identity),
            "optimizer_steps": steps,
            "files": sorted(files),
        }
        (folder / megatron_form.ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        sync_file(folder / megatron_form.ABOUT)
    dist.barrier()


def read_about(folder: Path, identity: Architecture | OtherModel) -> tuple[int, list[str]]:
    """Optimizer steps taken, and which files there are.

    Raises:
        CheckpointError: the folder is no checkpoint of this model.
    """
    # Fields are compared one by one, so anything that has fields will do.
    return megatron_form.read_about(folder, cast(Architecture, identity))


def read_into(targets: Tensors, folder: Path, name: str, model: Any) -> None:
    """Fills `targets` from one of the folder's files.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        found = names.imported(model, load_file(str(folder / name)), targets)
    except (OSError, SafetensorError, ModelError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    for key, target in targets.items():
        names.fill(target, found[key])
