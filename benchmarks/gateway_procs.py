"""Processes of the benchmark: started with their output in a file, found again by a later call, ended by pid.

In: commands. Out: `Process`es on record in `NAME.json`, with the moment at which the kernel started them, so that a pid that belongs to
somebody else by now is left alone. It waits for a process to become ready, and to end, with a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

READY_S = 60.0
END_S = 20.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One that runs, or ran."""

    name: str
    pid: int
    born: int
    """Clock ticks from the boot to its start."""
    url: str

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[19]) == self.born and fields[0] != "Z"


class ProcessDesk:
    """The processes on record in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def find(self, name: str) -> Process | None:
        """The process of that name, if it runs."""
        try:
            found = Process(**json.loads((self.folder / f"{name}.json").read_bytes()))
        except FileNotFoundError:
            return None
        return found if found.alive else None

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        url: str | None = None,
        more: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ) -> Process:
        """Starts a process and waits until it is ready: one of ours writes its URL to `NAME.url`; of another one `url`/health must answer.
        `more` is added to its environment.

        Raises:
            RuntimeError: it ended, or is not ready after `ready_s`; the message holds its last words.
        """
        said, log = self.folder / f"{name}.url", self.folder / f"{name}.log"
        said.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(more or {})}
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        self._children[child.pid] = child
        made = Process(name, child.pid, int(_stat(child.pid)[19]), url or "")
        self._note(made)
        deadline = time.monotonic() + ready_s
        while True:
            if url is not None and _answers(f"{url}/health"):
                return made
            if url is None and said.exists():
                made = Process(name, made.pid, made.born, said.read_text())
                self._note(made)
                return made
            if child.poll() is not None or time.monotonic() > deadline:
                self.end(made)
                raise RuntimeError(f"{name} did not become ready; its last words:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _note(self, process: Process) -> None:
        (self.folder / f"{process.name}.json").write_text(json.dumps(asdict(process)))

    def end(self, process: Process) -> None:
        """SIGTERM, and SIGKILL where that does not help within END_S."""
        for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 5.0)):
            if process.alive:
                os.kill(process.pid, number)
            deadline = time.monotonic() + patience_s
            while process.alive and time.monotonic() < deadline:
                if (child := self._children.get(process.pid)) is not None:
                    child.poll()  # reaps it
                time.sleep(0.02)
        if (child := self._children.pop(process.pid, None)) is not None:
            child.wait()
        (self.folder / f"{process.name}.json").unlink(missing_ok=True)

    def end_all(self) -> list[str]:
        """Ends every process on record; their names."""
        found = [self.find(path.stem) for path in sorted(self.folder.glob("*.json"))]
        for process in found:
            if process is not None:
                self.end(process)
        return [process.name for process in found if process is not None]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status) == 200
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def cpu_s(pid: int) -> float:
    """User and system time of a process with all its threads, and of its children, seconds; the kernel counts in hundredths."""
    fields = _stat(pid)
    own = (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        children = []
    return own + sum(cpu_s(int(child)) for child in children)


def rss_kb(pid: int) -> float:
    """The resident set of a process, KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1])
    raise RuntimeError(f"process {pid} is gone")
