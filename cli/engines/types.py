"""Words of the managed engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

WorkerType = Literal["regular", "prefill", "decode"]


class EngineSetupError(ValueError):
    """Engines that cannot be installed, described or started as asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """The engines' own Python environment."""

    folder: Path
    python: Path
    device: Literal["cpu", "cuda"]
    """What its torch computes on."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of sglang, the router and torch."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines of one kind."""

    kind: WorkerType = "regular"
    engines: int = 1
    gpus_per_engine: int = 1
    """Tensor parallel size (times pipeline size, which is 1)."""
    options: Mapping[str, object] = field(default_factory=dict)
    """SGLang's options by their field names (`mem_fraction_static`), as they go on the command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of SGLang's, for what has no option."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All engines behind one router."""

    groups: tuple[EngineGroup, ...]
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One process to start."""

    name: str
    """engine-0, engine-0.1 (second node of engine 0), router."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the environment."""
    url: str
    """Where it answers; "" for a node that only computes."""
    kind: WorkerType | Literal["router"] = "regular"
    bootstrap_port: int | None = None
    """Of a prefill engine: where decode engines fetch caches from."""
    node: int = 0
    """On which host of a multi-node engine or fleet it runs; 0 is this one."""
