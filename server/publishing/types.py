"""Words of a publish: what the trainer is told of the engines, what it tells of the weights, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from palestra.server.gate import Gate
from palestra.server.signal import Signal
from palestra.server.workers.types import EngineKind, Fleet

Transport = Literal["disk", "delta", "tensor", "distributed"]
Digests = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor as its engine keeps it -> the first 16 hex digits of sha256 over its raw bytes, and its shape (empty: not compared)."""


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """An engine that takes part in a publish."""

    url: str
    ranks: int
    """Processes of it that join a weight group and read handles: its tensor parallel size."""


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """Who shall get the weights."""

    kind: EngineKind
    device: str
    """What the engines compute on: cpu or cuda."""
    workers: tuple[TargetWorker, ...]


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a finished publish was for the engines."""

    train_step: int
    """Whose weights they are."""
    still_s: float
    """How long no engine sampled, seconds."""
    drain_s: float
    """How long running requests were waited for before that (`finish` alone), seconds."""
    calls: int
    """Requests that carried or announced weights, or named a folder; each went to every engine."""
    serving: int
    """Engines that have the new version."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why it is quarantined."""


class Engines(Protocol):
    """What a publish needs of the engine client."""

    salt: str | None
    """Goes into the cache key of every request; None: nothing does."""

    @property
    def fleet(self) -> Fleet:
        """The workers."""

    @property
    def gate(self) -> Gate:
        """Cleared: no request goes to an engine."""

    @property
    def idle(self) -> Signal:
        """Notified whenever a request leaves an engine."""

    @property
    def on_wire(self) -> int:
        """Requests that an engine has."""


class Versions(Protocol):
    """Which policy versions were published."""

    def highest_version(self) -> int:
        """-1 where none was."""

    def record_publish(self, version: int, train_step: int) -> None:
        """Puts a version on record, durably."""
