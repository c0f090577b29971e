"""A model's tensors under their Hugging Face names, and back.

In: tensors by the names that transformers' module gives them, in which the experts of a layer may be one. Out: whole tensors by the names
of the folder. transformers' own conversions are applied, in both directions. Where there are several ranks all of them make the same
calls, and a tensor is put together from all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from palestra.trainer.types import ModelError

_BLOCK = re.compile(r"(.*?\.\d+)\.")


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that a checkpoint holds; one that has two names under its first."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor put together from all ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a whole tensor into one that may be sharded."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(value)
            return
        value = value.to(target.device)
        # Every rank holds the whole and takes its own part of it; nothing is sent.
        part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())


def exported(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and whole tensor of each of `tensors`, in a stable order; a layer's at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, names in groupby(tensors, key=_block):
        block = {name: whole(tensors[name]) for name in names}
        for name, tensor in revert_weight_conversion(model, block).items():
            yield name, tensor.contiguous()


def _block(name: str) -> str:
    """The layer of a parameter; its own name where it is in none."""
    found = _BLOCK.match(name)
    return found[1] if found else name


def imported(
    model: Any, named: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Whole tensors by the names of `wanted`, made from tensors under Hugging Face names.

    transformers joins experts only while it loads a model, so one more is loaded here for as long as this takes.

    Raises:
        ModelError: one is missing, of another shape, or of no use.
    """
    try:
        loaded, told = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(named), dtype=torch.float32, output_loading_info=True
        )
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"tensors do not fit the model: {error}") from error
    missing = sorted(told["missing_keys"] & wanted.keys())
    if missing or told["unexpected_keys"]:
        strange = sorted(told["unexpected_keys"])
        raise ModelError(f"tensors do not fit the model: missing {missing[:5]}, unknown {strange[:5]}")
    found = own_tensors(loaded)
    return {name: found[name].detach() for name in wanted}
