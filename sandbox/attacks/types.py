"""Words of the escape probes: what is tried, what was seen of it, and what that means. Loads nothing heavy; waits for nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from palestra.sandbox.types import MIB, Box, Enforced, ExecResult, Limits

if TYPE_CHECKING:
    from palestra.sandbox.attacks.scene import Scene

Verdict = Literal["contained", "weaker", "ESCAPED", "untried"]
"""contained   it did not get what it wanted
weaker      it did, and the backend says of itself that it does not hold this here
ESCAPED     it did, and nobody said so
untried     the probe itself did not work: nothing is known
"""

Promise = Literal["files", "network", "processes", "memory", "pids", "disk", "syscalls", "cpu"]
"""A field of `types.Enforced`."""

BOUNDS = Limits(
    memory_bytes=128 * MIB,
    pids=32,
    disk_bytes=16 * MIB,
    file_bytes=24 * MIB,
    open_files=128,
    output_bytes=16 * 1024,
    total_output_bytes=MIB,
)
"""Of the boxes that are attacked: small, so that reaching a bound is quick."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What an attack came to."""

    verdict: Verdict
    how: str
    """In a few words that are the same on every run."""
    detail: str = ""
    """What was seen; for people."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be known of an attack when it is over."""

    result: ExecResult
    said: Mapping[str, str]
    """What the code told of its attempts: `DONE`, the name of an error, or a number."""
    scene: Scene
    """The place out here, to look whether something arrived."""
    limits: Limits
    usable: bool = True
    """Whether the same box still ran code afterwards."""
    survivors: int = 0
    """Processes of the attack that were alive when its run was over."""
    fetched: bytes = b""
    """What came out by the box's own interface."""
    attempts: Mapping[str, str] = field(default_factory=dict)
    """What the box's own interface answered, by call."""


Judge = Callable[[Seen], Judged]
Act = Callable[[Box, "Scene"], Awaitable[tuple[bytes, dict[str, str]]]]
"""What is done through the interface once the code ran: what came out, and what each call answered."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One escape probe."""

    name: str
    tries: str
    """What it tries, in a line."""
    promise: Promise
    """What would be broken."""
    code: str
    """Python that runs in the box, after `prelude.PRELUDE`."""
    judge: Judge
    timeout: float = 10.0
    """Seconds; a probe that is meant to be stopped has a short one."""
    act: Act | None = None
    limits: Limits = BOUNDS
    harmless: bool = False
    """Whether it may be run where nothing confines it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An attack on a backend, judged."""

    attack: Attack
    judged: Judged
    seconds: float


DEGRADABLE = frozenset(("memory", "pids", "disk", "syscalls", "cpu"))
"""Promises that a backend may hold less than wholly, if it says so. The others are what a sandbox is."""


def weigh(attack: Attack, judged: Judged, enforced: Enforced) -> Judged:
    """The verdict in the light of what the backend says of itself: an admitted weakness is none that nobody knew of."""
    level = getattr(enforced, attack.promise)
    if judged.verdict == "ESCAPED" and attack.promise in DEGRADABLE and level != "kernel":
        said = "is not held" if level == "none" else "is watched only"
        return Judged("weaker", f"{attack.promise} {said}", f"{judged.how}; {judged.detail}")
    return judged
