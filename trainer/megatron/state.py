"""What a checkpoint of the backend consists of: weights, both Adam moments and the KL reference, all under Hugging Face names.

Names and shapes are the model's, not a layout's, so any layout can read what another wrote, and the weights can be opened with any
safetensors reader. Files are written into a folder that the caller makes whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from palestra.trainer.durable import sync_file
from palestra.trainer.megatron import convert
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.types import CheckpointError, ModelError

Tensors = Mapping[str, torch.Tensor]
"""By megatron's parameter names."""

MODEL, FIRST, SECOND, REFERENCE, ABOUT = (
    "model.safetensors",
    "exp_avg.safetensors",
    "exp_avg_sq.safetensors",
    "reference.safetensors",
    "backend.json",
)


def write(folder: Path, arch: Architecture, files: Mapping[str, Tensors], steps: int) -> None:
    """Writes each file's tensors and what they are of.

    Raises:
        CheckpointError: the disk refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        named = {key: value.cpu() for key, value in convert.export(tensors, arch)}
        try:
            save_file(named, str(folder / name), {"format": "pt"})
        except SafetensorError as error:  # how safetensors reports a full disk
            raise CheckpointError(f"{folder / name} could not be written: {error}") from error
        sync_file(folder / name)
    about = {"format": 1, "architecture": dataclasses.asdict(arch), "optimizer_steps": steps, "files": sorted(files)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    sync_file(folder / ABOUT)


def read_about(folder: Path, arch: Architecture) -> tuple[int, list[str]]:
    """Optimizer steps taken, and which files there are.

    Raises:
        CheckpointError: the folder is no checkpoint of this model.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        saved, steps, files = about["architecture"], int(about["optimizer_steps"]), list(about["files"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint: {error}") from error
    mine = dataclasses.asdict(arch)
    if differing := sorted(key for key in mine if saved.get(key) != mine[key]):
        told = ", ".join(f"{key}: {saved.get(key)} there, {mine[key]} here" for key in differing)
        raise CheckpointError(f"{folder} is of another model ({told})")
    return steps, files


def read_into(targets: Tensors, folder: Path, name: str, arch: Architecture) -> None:
    """Fills `targets` from one of the folder's files.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with safe_open(str(folder / name), framework="pt") as handle:
            get: Callable[[str], torch.Tensor] = handle.get_tensor
            convert.load(targets, arch, get)
    except (OSError, SafetensorError, ModelError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
