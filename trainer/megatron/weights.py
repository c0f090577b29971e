"""Reads the safetensors of a Hugging Face folder by tensor name; one file or many with an index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from palestra.trainer.types import ModelError


class HfWeights:
    """Tensors of a folder, read when they are asked for. Use it as `weights(name)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _name_to_file(folder)

    def names(self) -> frozenset[str]:
        """Every tensor of the folder."""
        return frozenset(self._files)

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype.

        Raises:
            ModelError: there is none of that name.
        """
        if name not in self._files:
            raise ModelError(f"{self.folder} has no tensor {name}")
        with safe_open(str(self._files[name]), framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def _name_to_file(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({file for file in listed.values() if not (folder / file).is_file()})
        if missing:
            raise ModelError(f"{index} names files that are not there: {', '.join(missing)}")
        return {name: folder / file for name, file in listed.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors: only safetensors checkpoints can be trained")
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as handle:
                names.update(dict.fromkeys(handle.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    return names
