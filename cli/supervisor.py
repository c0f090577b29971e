"""Starts a run's roles in order, watches them, and ends them: the part of `palestra train` that outlives every fault of the others.

In: a prepared run folder and a Launcher. Out: an exit status: 0 the run is done, 130 it was stopped and can be resumed, 1 it cannot go on,
with one message that says which role failed and what it said last. Every wait has a deadline. No torch here.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from palestra.cli.config import RunConfig
from palestra.cli.launch.types import Launcher, LaunchError, RoleProcess, RoleSpec
from palestra.cli.progress import Progress
from palestra.cli.status import get, role_status

ORDER = ("engine", "service", "worker", "trainer")
POLL_S = 0.25
STOP_S = {"worker": 5.0, "service": 15.0, "engine": 5.0}
"""How long a role may take to end by itself, seconds. A trainer that still runs when the others end is not waited for: what it
acknowledged is on the disk."""


class Supervisor:
    """One run's processes."""

    def __init__(self, folder: Path, config: RunConfig, launcher: Launcher, progress: Progress) -> None:
        self.folder, self.config, self.launcher, self.progress = folder, config, launcher, progress
        self.roles: dict[str, RoleProcess] = {}
        self._interrupts = 0
        self._wake = threading.Event()

    def run(self) -> int:
        """The whole run. Ends every role before it returns.

        Raises:
            LaunchError: a role did not start or ended by a fault.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in ORDER:
                self._start(name)
                if self._interrupts:
                    return 130
            return self._watch()
        finally:
            self._stop_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._wake.set()

    def _start(self, name: str) -> None:
        self.progress.waits(f"starting {name}")
        threads = {"engine": self.config.rollout.threads, "trainer": self.config.train.threads}.get(name, 1)
        env = {
            # Threads that spin while they wait starve the neighbour on the same cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        }
        started = time.monotonic()
        role = self.roles[name] = self.launcher.start(RoleSpec(name, self.folder, env))
        deadline = started + self.config.run.start_deadline_s
        while not self._ready(name):
            if (status := role.poll()) is not None:
                raise self._failed(name, status)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{name} was not ready within {self.config.run.start_deadline_s:.0f} s (run.start_deadline_s); "
                    f"it last said:\n{role.last_words()}"
                )
            if self._interrupts:
                return
            self._wake.wait(POLL_S)
        self.progress.say(f"{name} ready in {time.monotonic() - started:.1f} s")

    def _ready(self, name: str) -> bool:
        try:
            url = json.loads((self.folder / "roles" / f"{name}.json").read_text())["url"]
        except (OSError, ValueError, KeyError):
            return False
        return get(f"{url}/health") is not None

    def _watch(self) -> int:
        trainer = self.roles["trainer"]
        asked = False
        last_status = 0.0
        while True:
            for name, role in self.roles.items():
                status = role.poll()
                if status is not None and (name != "trainer" or status != 0):
                    raise self._failed(name, status)
            self.progress.update()
            if trainer.poll() == 0:
                return 130 if asked else 0
            if self._interrupts and not asked:
                asked = True
                self._wake.clear()
                self.progress.say("stopping after this step; interrupt again to stop at once")
                threading.Thread(target=trainer.stop, args=(self.config.schedule.deadline_s,), daemon=True).start()
            elif self._interrupts > 1:
                self.progress.say("stopped at once; what was acknowledged is kept: go on with --resume")
                return 130
            if time.monotonic() - last_status > 1.0:
                last_status = time.monotonic()
                self.progress.waits(self._doing())
            self._wake.wait(POLL_S)

    def _doing(self) -> str:
        said = []
        for name in ("trainer", "service"):
            try:
                url = json.loads((self.folder / "roles" / f"{name}.json").read_text())["url"]
            except (OSError, ValueError, KeyError):
                continue
            said.append(role_status(name, url) or f"{name} ends or is busy")
        return "; ".join(said)

    def _failed(self, name: str, status: int) -> LaunchError:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        words = self.roles[name].last_words()
        return LaunchError(
            f"{name} {how}; the run cannot go on. Nothing that was acknowledged is lost: go on with --resume.\n"
            f"Its log: {self.folder / 'log' / f'{name}.jsonl'}" + (f"\nIt last said:\n{words}" if words else "")
        )

    def _stop_all(self) -> None:
        """Ends what still runs, those who call before those who are called."""
        for name in reversed(ORDER):
            role = self.roles.get(name)
            if role is None:
                continue
            if self._interrupts > 1 or name == "trainer":
                role.kill() if role.poll() is None else role.stop(0)
            else:
                role.stop(STOP_S[name])
