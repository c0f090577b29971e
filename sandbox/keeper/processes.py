"""Processes as the keeper sees them: whose children they are, how much memory they have. Waits for nothing."""

from __future__ import annotations

import os
import signal

from palestra.sandbox.inside.kernel import parents

PAGE = os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> set[int]:
    """Children of a process and of its threads, zombies too; none if it is gone."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.update(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        if found or os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
            return found
        # A kernel without that file: from the other side.
        return {child for child, parent in parents().items() if parent == pid}
    return found


def descendants(pid: int) -> set[int]:
    """All below a process, without itself."""
    found: set[int] = set()
    pending = [pid]
    while pending:
        more = children(pending.pop()) - found
        found |= more
        pending += more
    return found


def kill(pids: set[int]) -> None:
    """Ends these, if they are still there."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def memory(pids: set[int]) -> dict[int, int]:
    """Bytes of each that no file backs: what it shares with its parent since a fork counts in both."""
    found = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                fields = file.read().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[pid] = (int(fields[1]) - int(fields[2])) * PAGE
    return found


def share(pids: set[int]) -> dict[int, int]:
    """Bytes of each, shared pages divided among those that share them. Costs a walk through its memory. Processes that may not be looked
    at are as `memory` has them."""
    found = memory(pids)
    for pid in list(found):
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        values = {line.split()[0]: int(line.split()[1]) for line in lines[1:] if len(line.split()) == 3}
        found[pid] = (values.get(b"Pss_Anon:", 0) + values.get(b"Pss_Shmem:", 0)) * 1024
    return found
