"""One engine or router as a process that cannot outlive us, nor leave anything behind.

In: an `EngineCommand` and a folder for its output. Out: a `Child`: how it ended, its processes, the end of its log. It is held by
`agents/leash.py`: whatever the process starts ends with it, and all of it ends when this process dies by any means. Waits only in `wait`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from palestra.agents import leash
from palestra.cli.engines.types import EngineCommand
from palestra.cli.launch.local import LISTENERS, PARENT
from palestra.cli.supervisor import how_it_ended

GRACE_S = {"cuda": 15.0, "cpu": 3.0}
"""Between SIGTERM and SIGKILL, seconds, by what an engine computes on. SGLang looks every 5 s whether it was asked to end, and then frees
the GPU's memory; on a CPU there is nothing to free."""
KILL_S = 10.0
"""How long the kernel may take to end what was killed (large memory takes a while)."""
LOG_END_BYTES = 256 * 1024
"""What is read of a log: enough for any traceback, and no more however long the engine ran."""
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", PARENT, LISTENERS)
"""Variables of ours that would lead the engines' Python into our environment, or belong to our roles."""


class Child:
    """A started process. Its output is appended to `FOLDER/NAME.out`: a file, because helpers of torch keep stdout open after the end."""

    def __init__(self, command: EngineCommand, folder: Path, grace_s: float = GRACE_S["cuda"]) -> None:
        """`grace_s`: seconds between SIGTERM and SIGKILL at its end.

        Raises:
            OSError: no process or file could be made.
        """
        self.name, self.log = command.name, folder / f"{command.name}.out"
        self._grace_s, self._ended = grace_s, None if command.argv else "has no command"
        folder.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair()
        words = [sys.executable, "-I", "-S", leash.__file__, str(theirs.fileno()), str(grace_s), *command.argv]
        kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        with theirs, self.log.open("ab") as output:
            self._log_start = output.tell()
            self._leash = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**kept, **command.env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def poll(self) -> str | None:
        """How it ended, in words that follow its name; None while any of it runs."""
        if self._ended is None and self._leash.poll() is not None:
            self._ended = self._last_word()
        return self._ended

    def pids(self) -> list[int]:
        """The processes that it consists of now, without those that went into sessions of their own; the first is the one started."""
        held = self._leash.pid
        found = [(parent != held, pid) for pid, parent, session in _processes() if session == held and pid != held]
        return [pid for _, pid in sorted(found)]

    def debugged(self) -> bool:
        """Whether somebody traces one of its processes: then it may stand still as long as it likes."""
        return any(_tracer(pid) for pid in self.pids())

    def ask(self) -> None:
        """Asks it to end: SIGTERM, and SIGKILL to all of it after the grace. Returns at once."""
        with contextlib.suppress(OSError):  # it has ended, and its leash with it
            self._control.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """SIGKILL to all of its processes, at once. What is left its leash collects."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> str:
        """Waits for the end of what was asked or killed, a bounded time; then ends it by force. How it ended, in words."""
        try:
            self._leash.wait(self._grace_s + KILL_S)
        except subprocess.TimeoutExpired:
            self._leash.kill()
            self._leash.wait()
        return self.poll() or "was ended"

    def log_end(self) -> str:
        """The end of what it has printed since this start."""
        try:
            with self.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_start, size - LOG_END_BYTES))
                return stream.read().decode("utf-8", "replace")
        except OSError as error:
            return f"(its log {self.log} cannot be read: {error.strerror})"

    def _last_word(self) -> str:
        """What the leash said last. One that died without a word leaves processes behind: they are ended here."""
        with self._control:
            self._control.settimeout(KILL_S)
            said = b""
            with contextlib.suppress(OSError):
                while chunk := self._control.recv(65_536):
                    said += chunk
        if not said:
            give_up = time.monotonic() + KILL_S
            while self.pids() and time.monotonic() < give_up:
                self.kill()
            return "lost the process that holds it, and was ended"
        word = json.loads(said)
        return how_it_ended(int(word["status"])) if "status" in word else f"could not be started: {word['fault']}"


def stop_all(children: Sequence[Child]) -> None:
    """Asks all to end at once, and returns when nothing of them is left."""
    for child in children:
        child.ask()
    for child in children:
        child.wait()


def shell_line(command: EngineCommand) -> str:
    """The command as it can be pasted into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items())]
    return " ".join([*settings, shlex.join(command.argv)])


def _processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of all that run, zombies left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The command's name stands in parentheses and may hold anything; the figures come after the last one.
            state, parent, _, session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state != b"Z":
                yield int(folder.name), int(parent), int(session)


def _tracer(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/status").read_text().split("TracerPid:")[1].split()[0])
    return 0
