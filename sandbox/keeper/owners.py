"""Who a box belongs to: names of folders and cgroups that tell whether their owners still live.

An owner is a service with its keeper: each as a process id and the moment it started, so that a number used again is no mistake. Waits for
nothing.
"""

from __future__ import annotations

import os


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if it is gone, or dead and not yet collected."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def name_of(service: int, keeper: int) -> str:
    """The owner's name.

    Raises:
        ProcessLookupError: one of the two is gone already.
    """
    parts = [_namespace()]
    for pid in (service, keeper):
        started = start_of(pid)
        if started is None:
            raise ProcessLookupError(f"process {pid} is gone")
        parts += [pid, started]
    return "-".join(map(str, parts))


def is_name(owner: str) -> bool:
    """Whether this is an owner's name: nothing under another name is ever removed or killed."""
    parts = owner.split("-")
    return len(parts) == 5 and all(part.isdecimal() and part.isascii() for part in parts)


def dead(owner: str) -> bool:
    """Whether an owner's service or keeper is gone. False for names that are not ours and for owners of another process namespace, whose
    numbers mean nothing here."""
    parts = owner.split("-")
    if not is_name(owner) or int(parts[0]) != _namespace():
        return False
    service, service_start, keeper, keeper_start = map(int, parts[1:])
    return start_of(service) != service_start or start_of(keeper) != keeper_start


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
