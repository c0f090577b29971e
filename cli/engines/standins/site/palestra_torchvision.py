"""Lets a torchvision that was built for CUDA be imported beside a torch that was built for the CPU.

Such a torchvision cannot load its library, and then stumbles over two operators that the library would have declared. They are declared
here without kernels, just before torchvision describes them, and only where its library did not load: whole installations are left
alone. Loaded at the interpreter's start by palestra_torchvision.pth, in the engines' own environment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DECLARED = ("nms", "qnms")
_kept: list[Any] = []
"""The declarations: torch takes them back when the object that made them is collected."""


class _Declarer:
    """Is asked for every module that is imported, finds none of them, and declares the operators when the time has come."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, always: others find the module."""
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    extension = importlib.import_module("torchvision.extension")
    if extension._has_ops():
        return
    library = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
    for name in DECLARED:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


sys.meta_path.insert(0, _Declarer())
