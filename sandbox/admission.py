"""How many boxes there may be at a time: by their number, and by the memory that they may use.

In: limits of boxes that are to be made or are gone. Out: whether there is room. Waits for nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

from palestra.sandbox.types import MIB, BoxSpec, SandboxUnavailableError

logger = logging.getLogger(__name__)

SHARE = 0.8
"""Of the memory that is free now, how much boxes may be promised: the rest is for the supervisor and the page cache."""


class Admission:
    """The room for boxes. A box has its place from before it is made until it is gone."""

    def __init__(self, boxes: int, memory_bytes: int | None) -> None:
        """At most `boxes` boxes, whose `Limits.memory_bytes` sum up to at most `memory_bytes` (None: no such bound)."""
        if boxes < 1:
            raise ValueError(f"boxes is {boxes}; it must be at least 1")
        if memory_bytes is not None and memory_bytes < 1:
            raise ValueError(f"memory_bytes is {memory_bytes}; it must be at least 1")
        self.boxes, self.memory_bytes = boxes, memory_bytes
        self.taken = 0
        """Boxes that have a place."""
        self.taken_bytes = 0
        """Memory promised to them."""

    def check(self, spec: BoxSpec) -> None:
        """Whether such a box can ever have a place.

        Raises:
            SandboxUnavailableError: it may use more memory than all boxes together.
        """
        if self.memory_bytes is not None and spec.limits.memory_bytes > self.memory_bytes:
            raise SandboxUnavailableError(
                f"a box of {spec.limits.memory_bytes // MIB} MiB, where all boxes together may have {self.memory_bytes // MIB} MiB: "
                "lower limits.memory_bytes, or raise the pool's memory_bytes"
            )

    def fits(self, spec: BoxSpec, leaving: tuple[BoxSpec, ...] = ()) -> bool:
        """Whether there is room for one more box of `spec`, once those of `leaving` are gone."""
        if self.taken - len(leaving) >= self.boxes:
            return False
        held = self.taken_bytes - sum(each.limits.memory_bytes for each in leaving)
        return self.memory_bytes is None or held + spec.limits.memory_bytes <= self.memory_bytes

    def take(self, spec: BoxSpec) -> None:
        """A box of `spec` has a place from here on."""
        self.taken += 1
        self.taken_bytes += spec.limits.memory_bytes

    def give(self, spec: BoxSpec) -> None:
        """A box of `spec` is gone."""
        self.taken -= 1
        self.taken_bytes -= spec.limits.memory_bytes

    def most(self, spec: BoxSpec) -> int:
        """How many boxes of `spec` there can be at a time."""
        if self.memory_bytes is None:
            return self.boxes
        return min(self.boxes, self.memory_bytes // spec.limits.memory_bytes)


def memory_here(root: Path = Path("/")) -> int:
    """Bytes that boxes on this machine may be promised: a share of what is available, or of what this process' cgroup leaves. `root` is
    where /proc and /sys are.
    """
    found = [_available(root / "proc/meminfo")]
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        (groups / "memory.max", groups / "memory.current"),
        (groups / "memory/memory.limit_in_bytes", groups / "memory/memory.usage_in_bytes"),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            found.append(max(0, most - now))
    return max(1, int(SHARE * min(found)))


def _available(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise SandboxUnavailableError(f"{path} has no MemAvailable: give the pool's memory_bytes")


def _number(path: Path) -> int | None:
    """A number in a file of the kernel's; None where there is none (no such controller, or "max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
