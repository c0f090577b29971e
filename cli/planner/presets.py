"""Models and devices that are known by name, from `presets.toml`. Read once, when this module is imported; no other I/O."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from palestra.trainer.layout.types import ModelDims

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or the CPU."""

    memory_bytes: int
    """That a process can have; 0: the host's."""
    flops: float
    """Dense bf16 operations per second."""
    hbm: float
    """Bytes per second of its memory."""
    source: str


_READ: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    files("palestra.cli.planner").joinpath("presets.toml").read_text(encoding="utf-8")
)
MODELS: Mapping[str, ModelDims] = {
    name: ModelDims(**{key: value for key, value in fields.items() if key != "source"})
    for name, fields in _READ["models"].items()
}
MODEL_SOURCES: Mapping[str, str] = {name: fields["source"] for name, fields in _READ["models"].items()}
DEVICES: Mapping[str, Device] = {
    name: Device(round(fields["memory_gib"] * GIB), fields["flops"], fields["hbm"], fields["source"])
    for name, fields in _READ["gpus"].items()
}
