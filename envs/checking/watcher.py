"""Watches what one process leaves behind. A script of its own process, without gymnasium:

    python -P watcher.py close|kill DEADLINE_S GRACE_S

It reads a request from its standard input and hands it to a process that uses the environment (`worker.py`); whatever that one starts, and
whoever goes into a session of its own, becomes a child of this process, its subreaper, once it is an orphan. `close`: the worker ends by
itself. `kill`: it is killed in the middle of an episode. What is still alive GRACE_S later is named, then ended.

Out: one line of JSON, {"left": [command lines], "fault": TEXT or null, "said": what the worker reported}. Every wait ends at the deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from palestra.sandbox.inside.kernel import PR_SET_CHILD_SUBREAPER, prctl
from palestra.sandbox.keeper.processes import children, descendants, kill


def main(arguments: Sequence[str]) -> int:
    """Runs the worker and tells what it left."""
    mode, deadline, grace_s = arguments[0], time.monotonic() + float(arguments[1]), float(arguments[2])
    request = sys.stdin.buffer.read()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryFile() as noise:
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "palestra.envs.checking.worker", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            start_new_session=True,
        )
        said, fault = _work(worker, request, mode, deadline)
        left = _leftovers(time.monotonic() + grace_s)
        if fault is not None:
            noise.seek(0)
            fault += "".join(f"\n{line}" for line in noise.read().decode("utf-8", "replace").splitlines()[-5:])
    print(json.dumps({"left": left, "fault": fault, "said": said}), flush=True)
    return 0


def _work(worker: subprocess.Popen[bytes], request: bytes, mode: str, deadline: float) -> tuple[object, str | None]:
    """Lets the worker work; what it said, and what went wrong."""
    assert worker.stdin is not None
    assert worker.stdout is not None, "both are pipes"
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(request)
        worker.stdin.close()
    line = _line(worker.stdout.fileno(), deadline)
    if mode == "kill" and line:
        worker.kill()
    fault = None if line else "it ended without a word"
    try:
        status = worker.wait(max(0.0, deadline - time.monotonic()))
        if status != 0 and mode != "kill":
            fault = f"it ended with status {status}"
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
        fault = "it did not end by its deadline"
    return (json.loads(line) if line else None), fault


def _line(descriptor: int, deadline: float) -> bytes:
    """The first line that comes by the deadline. Orphans may hold the pipe open, so its end is not waited for."""
    read = b""
    while b"\n" not in read:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready or not (more := os.read(descriptor, 65536)):
            return b""
        read += more
    return read.partition(b"\n")[0]


def _leftovers(deadline: float) -> list[str]:
    """Command lines of what is alive at the deadline; nothing of it is left afterwards."""
    while _collect() and time.monotonic() < deadline:
        _await_one(deadline)
    left = sorted(_command_line(pid) for pid in descendants(os.getpid()))
    while _collect():
        kill(descendants(os.getpid()))
        _await_one(time.monotonic() + 1.0)
    return left


def _collect() -> bool:
    """Takes in children that have ended; whether some are alive."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _await_one(deadline: float) -> None:
    """Waits until some child ends, or the deadline."""
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = "gone"
    return f"{pid} {words[:200]}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this decides; it has to clear up
    sys.exit(main(sys.argv[1:]))
