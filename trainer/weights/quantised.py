"""Weights in 8-bit blocks, as an engine whose folder is block-quantised wants them: pure functions over tensors, on any device.

In: tensors by name and the `quantization_config` of the engine's folder. Out: the same pass with each linear weight as float8 e4m3 and a
float32 scale per block beside it.

The form is DeepSeek-V3's (technical report, section 3.3; `weight_scale_inv` of its checkpoints): a block of 128x128 is divided by
amax / 448, 448 being the largest float8 e4m3 number, and `weight_scale_inv` is what to multiply with. The order of the operations is that
of transformers' fine-grained fp8 quantiser, so that every bit is the same as its: with f = 1 / amax * 448, x * f is rounded and 1 / f is
the scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from palestra.trainer.types import TrainerError
from palestra.trainer.weights.types import Export

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A block whose scale would be smaller counts as zeros: its numbers lie below 1e-35, and some devices take such a scale for zero."""
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = "_scale_inv"
"""After a weight's name: the name of its scales."""


class QuantiseError(TrainerError):
    """Weights that cannot be quantised, or a form that is not built."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a folder is quantised."""

    rows: int
    columns: int
    skipped: tuple[str, ...] = ()
    """`modules_to_not_convert`: dotted module paths, or parts of such."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> BlockForm:
        """Reads a `quantization_config`.

        Raises:
            QuantiseError: it is of another kind.
        """
        wanted: dict[str, tuple[Any, ...]] = {
            "quant_method": ("fp8",),
            "fmt": (None, "e4m3"),
            "activation_scheme": (None, "dynamic"),
        }
        wanted |= {"scale_fmt": (None, "float"), "expert_dtype": (None, "fp8"), "modules_to_convert": (None, [])}
        for key, values in wanted.items():
            if config.get(key) not in values:
                raise QuantiseError(
                    f"quantization_config.{key} = {config.get(key)!r} is not built: engines can be updated with float8 e4m3 "
                    "blocks alone (`palestra convert --quantize fp8-block` makes such a folder)"
                )
        block = config.get("weight_block_size")
        if not isinstance(block, list | tuple) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
            raise QuantiseError(f"quantization_config.weight_block_size = {block!r}: two whole numbers are wanted")
        skipped = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
        for name in skipped:
            if not isinstance(name, str) or not name.replace("_", "").replace(".", "").replace("-", "").isalnum():
                raise QuantiseError(
                    f"quantization_config.modules_to_not_convert: {name!r} is no module path; patterns are not built"
                )
        return cls(block[0], block[1], tuple(name.strip(".") for name in skipped))

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a model is quantised: weights of linear layers, but no embedding, output layer, norm or router.

        Raises:
            QuantiseError: experts in one tensor, or a tensor that is quantised already.
        """
        module, _, leaf = name.rpartition(".")
        parts = module.split(".")
        if name.endswith(("_scale_inv", "weight_scale", "input_scale")):
            raise QuantiseError(f"{name}: these weights are quantised already")
        if len(shape) > 2 and "experts" in (*parts, leaf):
            raise QuantiseError(f"{name} holds all experts in one tensor {shape}; a tensor per expert is wanted")
        if leaf != "weight" or len(shape) != 2 or not _is_linear(parts):
            return False
        return not any(f".{skipped}." in f".{module}." for skipped in self.skipped)


def _is_linear(parts: list[str]) -> bool:
    """By the names that Hugging Face models give their modules."""
    last = parts[-1]
    if last in ("lm_head", "gate", "router") or last.endswith(("_gate", "norm")):
        return False
    return not any("embed" in part or part in ("wte", "wpe") for part in parts)


def quantise(name: str, weight: torch.Tensor, form: BlockForm) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [rows, columns] in float8 and its scales [blocks of rows, blocks of columns]; last blocks may be smaller.

    Raises:
        QuantiseError: it is not of 16 or 32 bits, or holds NaN or an infinity; `name` is said.
    """
    if weight.dtype not in SOURCES:
        raise QuantiseError(f"{name} is {weight.dtype}: float32, bfloat16 or float16 is wanted")
    rows, columns = weight.shape
    down, across = -(-rows // form.rows), -(-columns // form.columns)
    full = torch.zeros(down * form.rows, across * form.columns, dtype=torch.float32, device=weight.device)
    full[:rows, :columns] = weight
    blocks = full.view(down, form.rows, across, form.columns)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise QuantiseError(f"{name} holds NaN or infinite numbers: the weights are broken, and none of them are sent")
    scale = torch.where(largest > 0, largest, 1.0).reciprocal() * MOST
    # A scale of 1 for zeros, so that nothing is divided by 0 at either end.
    scale = torch.where((largest > 0) & (scale <= 1 / LEAST_SCALE), scale, 1.0)
    blocks *= scale[:, None, :, None]
    packed = full.clamp_(-MOST, MOST)[:rows, :columns].to(FP8).contiguous()
    return packed, 1.0 / scale


def quantised(export: Export, config: Mapping[str, Any]) -> Export:
    """The export that an engine wants whose folder's config.json has this `quantization_config`: each quantised weight is followed by its
    scales. One tensor at a time is held. The pass raises QuantiseError of what cannot be quantised.

    Raises:
        QuantiseError: the config is of a kind that is not built.
    """
    form = BlockForm.of(config)

    def start() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in export():
            if form.takes(name, tuple(tensor.shape)):
                packed, scales = quantise(name, tensor.detach(), form)
                yield name, packed
                yield name + SCALE, scales
            else:
                yield name, tensor

    return start
