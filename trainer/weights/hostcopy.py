"""The bytes of the last publish, kept in host memory, so that the next one can be compared with them.

In: passes over the trainer's weights. Out: what changed, and passes over the copy. It takes as much memory as the weights have bytes, once,
and one piece more while it compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from palestra.trainer.types import TrainerError
from palestra.trainer.weights.deltacoding import Bytes
from palestra.trainer.weights.weightfiles import Layout, TensorSpot, digest_of

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' words."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of the copy."""

    tensor: torch.Tensor
    data: Bytes
    """The tensor's memory."""

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """Dtype, in safetensors' words, and shape."""
        return DTYPES[self.tensor.dtype], tuple(self.tensor.shape)

    def fits(self, other: torch.Tensor) -> bool:
        """Whether `other` has the same dtype and shape."""
        return (self.tensor.dtype, self.tensor.shape) == (other.dtype, other.shape)


class HostCopy:
    """Tensors by name, in the order in which they were first kept."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> Kept | None:
        """A tensor of the copy."""
        return self._kept.get(name)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor's bytes, into the memory of its forerunner where that has the same form.

        Raises:
            TrainerError: of a dtype that a folder cannot hold.
        """
        if tensor.dtype not in DTYPES:
            raise TrainerError(f"{name} has dtype {tensor.dtype}, which is not published")
        kept = self._kept.get(name)
        if kept is None or not kept.fits(tensor):
            room = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kept[name] = kept = Kept(room, bytes_of(room))
        np.copyto(kept.data, bytes_of(tensor))

    def drop_others(self, names: set[str]) -> None:
        """Forgets all but `names`."""
        self._kept = {name: kept for name, kept in self._kept.items() if name in names}

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the copy: views of its memory, good until the next `keep`."""
        for name, kept in self._kept.items():
            yield name, kept.tensor

    def compare(self, layout: Layout) -> None:
        """Whether a folder holds these tensors with these bytes.

        Raises:
            TrainerError: names the tensor that differs.
        """
        if len(layout.tensors) != len(self._kept):
            raise TrainerError(f"a folder of {len(self._kept)} tensors was written with {len(layout.tensors)}")
        for spot in layout.tensors:
            self._compare(spot)

    def _compare(self, spot: TensorSpot) -> None:
        kept = self._kept.get(spot.name)
        if kept is None or kept.form != (spot.dtype, spot.shape):
            form = "not known" if kept is None else " ".join(map(str, kept.form))
            raise TrainerError(f"{spot.name} was written as {spot.dtype} {spot.shape}, and is {form}")
        if digest_of(kept.data) != spot.digest:
            raise TrainerError(f"{spot.name} in {spot.file} reads back differently from what was written")


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes on the host; the tensor's own memory where it is there already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data
