"""Memory that the host shares with its environments' processes: what each does, since when, and how many steps it made.

A process writes into its own slot, the host reads all of them: no message is sent for it, and a process that hangs is seen.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

from palestra.server.env_host.types import Phase

_SLOT = struct.Struct("<dQQ")
SIZE = 32
"""Bytes of a slot."""


class Slot:
    """One process's."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._memory, self._at = memory, number * SIZE
        self.number = number

    def mark(self, phase: Phase, steps: int = 0) -> None:
        """From now on it does this; `steps`: how many it has made."""
        # Seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
        _SLOT.pack_into(self._memory, self._at, time.monotonic(), phase, steps)

    def look(self) -> tuple[float, Phase, int]:
        """Seconds since it does what it does; what that is; steps so far."""
        since, phase, steps = _SLOT.unpack_from(self._memory, self._at)
        return time.monotonic() - since, Phase(phase), steps


def make(count: int) -> int:
    """A descriptor of memory for `count` slots."""
    fd = os.memfd_create("palestra-envs", os.MFD_CLOEXEC)
    os.ftruncate(fd, count * SIZE)
    return fd


def attach(fd: int) -> mmap.mmap:
    """The memory behind a descriptor of `make`."""
    return mmap.mmap(fd, 0)
