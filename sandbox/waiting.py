"""Who waits for a box of the pool, and who has one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from palestra.sandbox.admission import Admission
from palestra.sandbox.types import MIB, Box, BoxSpec, SandboxError


@dataclass(slots=True)
class Waiter:
    """Somebody who asked for a box."""

    spec: BoxSpec
    future: asyncio.Future[Box]
    holder: str
    """Name of the task that asked."""
    since: float = field(default_factory=time.monotonic)

    def tell(self, error: SandboxError) -> None:
        """There will be none."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Lease:
    """A box that somebody has."""

    box: Box
    holder: str
    since: float = field(default_factory=time.monotonic)


def whereabouts(room: Admission, leases: Collection[Lease], warm: int, making: int, leaving: int, waiting: int) -> str:
    """Where the boxes are, for somebody who had none."""
    parts = [
        f"{len(leases)} of at most {room.boxes} boxes are in use, {warm} warm, {making} being made, {leaving} being destroyed; "
        f"{waiting} others wait"
    ]
    if room.memory_bytes is not None:
        parts.append(f"{room.taken_bytes // MIB} of {room.memory_bytes // MIB} MiB are promised")
    if oldest := min(leases, key=lambda lease: lease.since, default=None):
        parts.append(f"the oldest has been with {oldest.holder} for {time.monotonic() - oldest.since:.0f} s")
    return "; ".join(parts) + ". Raise the number of boxes (or their memory), or wait longer"
