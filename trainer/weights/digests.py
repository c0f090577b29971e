"""What engines must have, as digests: computed while weights are on their way, compared by the service with what engines say.

In: tensors' bytes under Hugging Face names, in export order. Out: engine's name -> the first 16 hex digits of sha256 over its raw bytes,
and the shape. The embedded engine keeps Hugging Face names. SGLang (its loaders, 0.5.23) fuses q, k and v; gate and up; and all experts of
a layer into w13 (gate and up of each) and w2. A fused tensor is the bytes of its parts one after the other, so a running hash suffices, if
the parts come in that order; where they do not, the name is left to the comparison between engines. Embeddings and the output layer have
rows of zeros behind them, up to a multiple of 64.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

Kind = Literal["embedded", "sglang"]
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PADDED = ("embed_tokens.weight", "lm_head.weight")
PADDED_ROWS = 64
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}


class _Running:
    def __init__(self) -> None:
        self.hash: Any = hashlib.sha256()
        self.next, self.ordered = 0, True


class Digester:
    """The digests of one publish."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._running: dict[str, _Running] = {}

    def add(self, name: str, flat: torch.Tensor, shape: tuple[int, ...]) -> None:
        """One tensor, as its flat bytes."""
        data = flat.cpu().numpy().tobytes()
        if self._kind == "sglang" and (place := sglang_place(name)) is not None:
            fused, rank = place
            running = self._running.setdefault(fused, _Running())
            running.ordered = running.ordered and running.next == rank
            running.next += 1
            running.hash.update(data)
            return
        found = hashlib.sha256(data)
        if self._kind == "sglang" and name.endswith(_PADDED) and (rows := -shape[0] % PADDED_ROWS):
            found.update(bytes(rows * (len(data) // shape[0])))
        self._whole[name] = (found.hexdigest()[:16], shape if self._kind == "embedded" else ())

    def result(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """All digests that stand for a tensor of the engine."""
        fused = {
            name: (running.hash.hexdigest()[:16], ())
            for name, running in self._running.items()
            if running.ordered and running.next % _PARTS.get(name.rsplit(".", 2)[-2], 1) == 0
        }
        return {**self._whole, **fused}


def sglang_place(name: str) -> tuple[str, int] | None:
    """The fused tensor that a Hugging Face tensor is a part of, and the how-manieth part; None where it is one of its own."""
    if (found := _EXPERT.fullmatch(name)) is not None:
        layer, index, part = found[1], int(found[2]), found[3]
        if part == "down_proj":
            return f"{layer}.w2_weight", index
        return f"{layer}.w13_weight", 2 * index + (part == "up_proj")
    parent, _, leaf = name.rpartition(".")
    owner, _, part = parent.rpartition(".")
    if part in _FUSED and owner.endswith((".self_attn", ".mlp")):
        fused, rank = _FUSED[part]
        return f"{owner}.{fused}.{leaf}", rank
    return None
