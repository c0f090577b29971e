"""Holds one command on a leash: whatever it starts is gone when it ends, when its deadline comes, and when its owner dies, by any means.

A script of its own process, on the standard library alone; `palestra.agents.command` starts it:

    python -I -S leash.py FD GRACE_S COMMAND...

FD is one end of a socket. It writes one line of JSON there when the command has ended: {"status": N}, N negative for a signal, or {"fault":
TEXT} where it could not be started. Once the other end is shut, the command gets SIGTERM, and SIGKILL after GRACE_S seconds. In either case
everything that came of the command is killed then, daemons that went into sessions of their own included: they become children of this
process, which is their subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns once nothing of it is left."""
    control, grace_s, command = socket.socket(fileno=int(arguments[0])), float(arguments[1]), list(arguments[2:])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an owner that ignores it must not make the command ignore it too
    try:
        process = subprocess.Popen(command, process_group=0)
    except (OSError, ValueError) as error:
        _tell(control, {"fault": f"{type(error).__name__}: {error}"})
        return 1
    ended = threading.Event()
    threading.Thread(target=_watch, args=(control, process, ended, grace_s), daemon=True).start()
    status = process.wait()
    ended.set()
    _signal_group(process.pid, signal.SIGKILL)
    _reap_all()
    _tell(control, {"status": status})
    return 0


def _watch(control: socket.socket, process: subprocess.Popen[bytes], ended: threading.Event, grace_s: float) -> None:
    """Ends the command once the owner has shut its end of the socket, or has died."""
    control.recv(1)
    _signal_group(process.pid, signal.SIGTERM)
    if not ended.wait(grace_s):
        _signal_group(process.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap_all() -> None:
    """Kills and collects children until there are none: orphans of those that died become children in their turn."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Pids whose parent this process is."""
    mine, found = os.getpid(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The command's name stands in parentheses and may hold anything; state and parent come after the last one.
            if int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1]) == mine:
                found.append(int(folder.name))
    return found


def _tell(control: socket.socket, what: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the owner may be gone
        control.sendall(json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
