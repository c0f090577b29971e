"""Roles as processes of this machine: each in a process group of its own, and gone when the supervisor is.

In: a RoleSpec. Out: a process whose output goes to `log/ROLE.out`. Waits only when a process is asked to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from palestra.cli.launch.types import RoleSpec

PARENT = "PALESTRA_PARENT_PID"
"""Environment variable with the supervisor's pid: a role asks the kernel to end it together with that process."""
LISTENERS = "PALESTRA_LISTENERS"
"""Environment variable with the descriptors of the listening sockets that a role is given, separated by commas."""


class LocalProcess:
    """One role's process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name, self._process, self._output = name, process, output
        self.pid = process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float) -> int:
        """SIGTERM, then SIGKILL after `timeout_s` seconds; its exit status."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()  # what did not end in time, and whatever it left in its group
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The last 15 lines that it printed."""
        try:
            lines = self._output.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-15:])

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return


class LocalLauncher:
    """Starts roles with this very Python."""

    def start(self, spec: RoleSpec) -> LocalProcess:
        """Starts one role."""
        output = spec.folder / "log" / f"{spec.name}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "palestra.cli.main",
            "role",
            spec.name,
            "--config",
            str(spec.folder / "run.toml"),
        ]
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
            PARENT: str(os.getpid()),
            LISTENERS: ",".join(map(str, spec.listeners)),
            **spec.env,
        }
        with output.open("ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=spec.listeners,
            )
        return LocalProcess(spec.name, process, output)
