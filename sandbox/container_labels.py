"""Whose a container is: the label of its owner, and whether that owner lives.

In: this machine's /proc. Out: a label, and a judgement of one. Waits for nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from palestra.sandbox.keeper.owners import start_of

OWNER, EXPIRES = "palestra.owner", "palestra.expires"
"""Labels: `BOOT/PID NAMESPACE/PID/START`, and a time in seconds since 1970."""

Owner = Literal["alive", "dead", "unknown"]


def place() -> str:
    """This boot of this machine, and this namespace of process ids: where a process id means something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot}/{namespace}"


def owner() -> str:
    """The label of this process."""
    pid = os.getpid()
    return f"{place()}/{pid}/{start_of(pid)}"


def judge(label: str) -> Owner:
    """Whether the owner of this label lives. Of another machine's, or another container's, nothing can be known here."""
    where, _, process = label.rpartition("/")
    where, _, pid = where.rpartition("/")
    if where != place() or not pid.isdecimal():
        return "unknown"
    return "alive" if str(start_of(int(pid))) == process else "dead"


def left_behind(labels: dict[str, str], now: float) -> bool:
    """Whether nobody will come back for this container: its owner is dead, or cannot be asked and promised to be done by now."""
    verdict = judge(labels.get(OWNER, ""))
    if verdict != "unknown":
        return verdict == "dead"
    expires = labels.get(EXPIRES, "")
    return expires.isdecimal() and int(expires) < now
