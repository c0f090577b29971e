"""New weights: tensors into the running model, checked first, then all or nothing; and what the weights in force are.

In: tensors under their Hugging Face names. Out: the model's parameters, overwritten in place. Waits for the disk.

transformers keeps the experts of a layer in one tensor; checkpoints and trainers name them one by one. So each Hugging
Face name is mapped to a view into the parameter that holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from palestra.server.embedded.buckets import FLOATS
from palestra.server.embedded.types import ModelRefused, TensorSlot, WeightsRefused

SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Words:
    """How a checkpoint calls what transformers calls `mlp`, `gate_proj`, `up_proj` and `down_proj`."""

    block: str
    gate: str
    up: str
    down: str


_USUAL = _Words("mlp", "gate_proj", "up_proj", "down_proj")
_WORDS = {"mixtral": _Words("block_sparse_moe", "w1", "w3", "w2")}
"""By `model_type`."""


class WeightViews:
    """Hugging Face name -> where it lives in the model."""

    def __init__(self, module: Any, folder: str) -> None:
        """
        Raises:
            ModelRefused: the folder's checkpoint has names that this engine could not update later.
        """
        self._views: dict[str, torch.Tensor] = {}
        self._home: dict[str, str] = {}  # tied names share one home
        homes: dict[int, str] = {}
        words = _WORDS.get(module.config.model_type, _USUAL)
        # Not parameters alone: the bias that balances a router's experts is a buffer, and belongs to a checkpoint.
        for name, tensor in module.state_dict().items():
            for given, view in _expert_views(name, tensor, words):
                self._views[given] = view
                self._home[given] = homes.setdefault(view.data_ptr(), given)
        if unknown := sorted(set(_stored_names(folder)) - set(self._views)):
            raise ModelRefused(
                f"{folder}: this architecture cannot be updated later, {_some(unknown)} are not its parameters"
            )

    def expect(self, slots: Sequence[TensorSlot]) -> None:
        """Whether tensors of such names, types and shapes can be put in: asked before their numbers travel.

        Raises:
            WeightsRefused: unknown names or types, one name twice, other shapes.
        """
        if unknown := sorted({slot.name for slot in slots} - set(self._views)):
            raise WeightsRefused(f"unknown tensors: {_some(unknown)}")
        if len({slot.name for slot in slots}) < len(slots):
            raise WeightsRefused("a tensor is named twice")
        for slot in slots:
            if slot.dtype not in FLOATS:
                raise WeightsRefused(f"{slot.name}: dtype {slot.dtype!r} is not one of {', '.join(FLOATS)}")
            if slot.shape != tuple(self._views[slot.name].shape):
                raise WeightsRefused(
                    f"{slot.name} has shape {list(slot.shape)}, the model {list(self._views[slot.name].shape)}"
                )

    def checksums(self, skip: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, list[int]]]:
        """Name -> the first 16 hexadecimal digits of sha256 over the tensor's bytes as the model keeps them, and name -> shape. Names that
        contain one of `skip` are left out."""
        sums: dict[str, str] = {}
        for name, view in self._views.items():
            if not any(part in name for part in skip):
                home = self._home[name]
                known = sums.get(home) if home != name else None
                sums[name] = known or digest(view)
        return sums, {name: list(self._views[name].shape) for name in sums}

    def check(self, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> None:
        """Whether they can be put in. `complete`: all parameters must be given.

        Raises:
            WeightsRefused: unknown names, other shapes, missing parameters, numbers that are not finite.
        """
        if unknown := sorted(set(tensors) - set(self._views)):
            raise WeightsRefused(f"unknown tensors: {_some(unknown)}")
        missing = sorted(set(self._home.values()) - {self._home[name] for name in tensors})
        if complete and missing:
            raise WeightsRefused(f"missing tensors: {_some(missing)}")
        seen: dict[str, str] = {}
        for name, tensor in tensors.items():
            view = self._views[name]
            if tensor.shape != view.shape:
                raise WeightsRefused(f"{name} has shape {list(tensor.shape)}, the model {list(view.shape)}")
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                raise WeightsRefused(
                    f"{name} ({tensor.dtype}) is not of floating point, or has numbers that are not finite"
                )
            first = seen.setdefault(self._home[name], name)
            if first != name and not torch.equal(tensors[first], tensor):
                raise WeightsRefused(f"{name} and {first} are one tensor in this model, but differ here")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the parameters with tensors that were checked."""
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor)


def read_folder(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder.

    Raises:
        WeightsRefused: there is none, or a file is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"{folder} has no safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors.update(load_file(file))
    except (OSError, SafetensorError) as fault:
        raise WeightsRefused(f"{folder} cannot be read: {fault}") from fault
    return tensors


def digest(tensor: torch.Tensor) -> str:
    """As SGLang's CPU engines have it: 16 hexadecimal digits of sha256 over the raw bytes."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.sha256(raw).hexdigest()[:16]


def _expert_views(name: str, tensor: torch.Tensor, words: _Words) -> Iterator[tuple[str, torch.Tensor]]:
    """gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner] hold all experts of a layer."""
    layer, found, part = name.partition(".mlp.")
    block = f"{layer}.{words.block}."
    if not found or not part.startswith("experts.") or tensor.dim() != 3:
        yield (block + part if found else name), tensor
        return
    part = part.removeprefix("experts.")
    for index, expert in enumerate(tensor):
        if part == "gate_up_proj":
            gate, up = expert.chunk(2)
            yield f"{block}experts.{index}.{words.gate}.weight", gate
            yield f"{block}experts.{index}.{words.up}.weight", up
        else:
            yield f"{block}experts.{index}.{words.down if part == 'down_proj' else part}.weight", expert


def _stored_names(folder: str) -> Iterator[str]:
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            yield from stored.keys()


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
