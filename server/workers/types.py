"""Words of the engines behind the service. A worker is one engine (however many processes it has), reached at one URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from palestra.server.types import EngineError

EngineKind = Literal["embedded", "sglang"]


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where the engines of a run are."""

    url: str
    """Where token traffic goes: the router, or the only engine."""
    workers: tuple[str, ...] = ()
    """The engines themselves, for control calls; empty: those that the router lists, or without a router `url` alone."""
    router: bool = False
    """Whether `url` is a router (sglang-router or smg: both have GET, POST and DELETE /workers)."""
    kind: EngineKind = "embedded"
    agents: Mapping[str, str] = field(default_factory=dict)
    """Worker -> URL of the `palestra engine agent` on its host, which fetches weights for it; only where there is one."""
    agent_token: str | None = None
    """What agents ask for; None: they ask for nothing."""


class WorkerState(StrEnum):
    """Whether a worker may have requests."""

    SERVING = "serving"
    QUARANTINED = "quarantined"
    """It failed, does not answer, or has other weights than those in force: it is out of routing until it is mended."""


@dataclass(slots=True)
class Worker:
    """One engine."""

    url: str
    state: WorkerState = WorkerState.SERVING
    why: str = ""
    """What it is quarantined for."""
    version: int = 0
    """Policy version that it was last seen with."""
    ranks: int = 1
    """Processes of it that join a weight group: its tensor parallel size."""
    agent: str | None = None
    """See `EnginePlace.agents`."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What several workers said to one control call."""

    ok: Mapping[str, Mapping[str, Any]]
    """Worker URL -> its answer."""
    failed: Mapping[str, EngineError]
    """Worker URL -> why there is none."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights in force, as a worker that comes late can have them."""

    version: int
    folder: str | None = None
    """A Hugging Face folder that engines can read; None: there is none."""
    shared: str | None = None
    """A folder of bases and deltas, of which agents make one; None: there is none. Without either the weights travelled by another way, and
    only the next publish brings a late worker up."""


class WorkerDown(EngineError):
    """A worker refuses connections, or breaks them: its process is gone."""


class WorkerSilent(EngineError):
    """A worker did not answer in time: it is frozen, or busy beyond measure."""


class Fleet(Protocol):
    """The engines, as whoever updates their weights sees them."""

    updating: bool
    """Set while weights change: nobody probes or mends a worker then, since engines that load weights may be silent for long."""

    def serving(self) -> list[Worker]:
        """Those that may have requests."""

    def members(self) -> list[Worker]:
        """All, the quarantined ones too."""

    async def ask(
        self, workers: Sequence[Worker], path: str, payload: Mapping[str, Any], *, timeout_s: float
    ) -> Answers:
        """One control call to each at once. Nothing is repeated but connections that were refused before a byte was sent; a worker that
        does not answer within `timeout_s` seconds has failed. Never raises for a worker's fault."""

    async def look(self, workers: Sequence[Worker], path: str, *, timeout_s: float) -> Answers:
        """As `ask`, for a GET."""

    async def quarantine(self, worker: Worker, why: str) -> None:
        """Takes a worker out of routing, and its requests off it: their partial completions go on elsewhere. The service's log and
        /status say why. Harmless where it is out already."""

    async def admit(self, worker: Worker, version: int) -> None:
        """Puts a worker that has the weights of `version` (back) into routing."""

    def in_force(self, weights: Weights) -> None:
        """Tells which weights a worker must have; late ones are brought up to them where there is a folder."""
