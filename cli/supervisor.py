"""Starts a run's roles in order, watches them, and ends them: what outlives every fault of the others.

In: a prepared run folder and a Launcher. Out: an exit status, or one message that says which role failed and what it said last. `Crew` is
what all runs have; `Supervisor` is a training run's: 0 it is done, 130 it was stopped and can be resumed. Every wait has a deadline. No
torch here.
"""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import FrameType
from typing import ClassVar

from palestra.cli.config import AnyConfig, RunConfig
from palestra.cli.evaluation.watch import EvalWatch
from palestra.cli.launch.types import Launcher, LaunchError, RoleProcess, RoleSpec
from palestra.cli.progress import Progress
from palestra.cli.status import get, role_status, role_url

POLL_S = 0.25
STOP_S = {"worker": 5.0, "service": 15.0, "engine": 20.0, "evaluator": 10.0}
"""How long a role may take to end by itself, seconds; an engine on a GPU lets go of its memory in order. A trainer that still runs when the
others end is not waited for: what it acknowledged is on the disk."""


class Crew(ABC):
    """One run's processes. A kind of run says which roles it has, and what it does while they run."""

    order: ClassVar[tuple[str, ...]] = ()
    """Its roles, those who are called before those who call."""
    interrupted: ClassVar[int] = 130
    """Exit status of a run that was stopped while it started."""

    def __init__(self, folder: Path, config: AnyConfig, launcher: Launcher, progress: Progress) -> None:
        self.folder, self.launcher, self.progress = folder, launcher, progress
        self.start_deadline_s = config.run.start_deadline_s
        managed = config.rollout.engine == "sglang"
        self.threads: dict[str, int | None] = {"engine": None if managed else config.rollout.threads}
        """CPU threads of the roles that compute, 1 for the others; None: as many as the role's libraries choose."""
        self.roles: dict[str, RoleProcess] = {}
        self.interrupts = 0
        self.wake = threading.Event()

    def run(self) -> int:
        """The whole run. Ends every role before it returns.

        Raises:
            LaunchError: a role did not start, or ended by a fault that the run does not outlive.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for name in self.order:
                self._start(name)
                if self.interrupts:
                    return self.interrupted
            return self.watch()
        finally:
            self._stop_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    @abstractmethod
    def watch(self) -> int:
        """From when all roles are ready to the end; the exit status.

        Raises:
            LaunchError: the run cannot go on.
        """

    @abstractmethod
    def advice(self, name: str) -> str:
        """What a user can do about a role that ended."""

    def listeners(self, name: str) -> tuple[int, ...]:
        """Descriptors of the listening sockets that a role is given."""
        return ()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        self.wake.set()

    def _start(self, name: str) -> None:
        self.progress.waits(f"starting {name}")
        started = time.monotonic()
        self.launch(name)
        if (status := self.until_ready(name)) is not None:
            raise self.failed(name, status)
        if not self.interrupts:
            self.progress.say(f"{name} ready in {time.monotonic() - started:.1f} s")

    def launch(self, name: str) -> None:
        """Starts a role's process. From the main thread only: the kernel ends a role together with the thread that started it."""
        # A place that a former process announced must not be taken for the new one's.
        (self.folder / "roles" / f"{name}.json").unlink(missing_ok=True)
        env = {
            # Threads that spin while they wait starve the neighbour on the same cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Megabytes of rows come and go: without these their pages are given back and faulted in again, a third of a claim's CPU time.
            "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **({} if (threads := self.threads.get(name, 1)) is None else {"OMP_NUM_THREADS": str(threads)}),
        }
        self.roles[name] = self.launcher.start(RoleSpec(name, self.folder, env, self.listeners(name)))

    def until_ready(self, name: str) -> int | None:
        """Waits until a role answers, or the user interrupts: None. Its exit status where it ended instead.

        Raises:
            LaunchError: neither within the deadline.
        """
        role, deadline = self.roles[name], time.monotonic() + self.start_deadline_s
        while not self._ready(name):
            if (status := role.poll()) is not None:
                return status
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{name} was not ready within {self.start_deadline_s:.0f} s (run.start_deadline_s); "
                    f"it last said:\n{role.last_words()}"
                )
            if self.interrupts:
                return None
            self.wake.wait(POLL_S)
        return None

    def _ready(self, name: str) -> bool:
        url = role_url(self.folder, name)
        return url is not None and get(f"{url}/health") is not None

    def failed(self, name: str, status: int) -> LaunchError:
        """Why the run ends: a role that ended."""
        words = self.roles[name].last_words()
        return LaunchError(
            f"{name} {how_it_ended(status)}; the run cannot go on. {self.advice(name)}\n"
            f"Its log: {self.folder / 'log' / f'{name}.jsonl'}" + (f"\nIt last said:\n{words}" if words else "")
        )

    def _stop_all(self) -> None:
        """Ends what still runs, those who call before those who are called."""
        for name in reversed(self.order):
            role = self.roles.get(name)
            if role is None:
                continue
            if self.interrupts > 1 or name == "trainer":
                role.kill() if role.poll() is None else role.stop(0)
            else:
                role.stop(STOP_S[name])


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


class Supervisor(Crew):
    """A training run's processes: any of them that ends by a fault ends the run, which can be resumed; but for the evaluator, which no
    training needs.
    """

    order = ("engine", "service", "worker", "trainer")

    def __init__(self, folder: Path, config: RunConfig, launcher: Launcher, progress: Progress) -> None:
        super().__init__(folder, config, launcher, progress)
        self.threads["trainer"] = config.train.threads
        self.deadline_s = config.schedule.deadline_s
        self.evals: EvalWatch | None = None
        if config.eval is not None:
            label = config.eval.label(config.env.id)
            self.evals = EvalWatch(folder, config.eval, label, self._launch_evaluator, progress.say)

    def watch(self) -> int:
        """See `Crew.watch`: until the trainer and the evaluations that it asked for end, or the second interrupt."""
        trainer = self.roles["trainer"]
        asked = False
        last_status = 0.0
        if self.evals is not None:
            self.evals.start()
        while True:
            self._check_roles()
            self.progress.update()
            if self.evals is not None:
                self.evals.look()
            if trainer.poll() == 0:
                if asked or self.evals is None or self.evals.over():
                    return 130 if asked else 0
                if self.interrupts:
                    return 130
            if self.interrupts and not asked:
                asked = True
                self.wake.clear()
                self.progress.say("stopping after this step; interrupt again to stop at once")
                threading.Thread(target=trainer.stop, args=(self.deadline_s,), daemon=True).start()
            elif self.interrupts > 1:
                self.progress.say("stopped at once; what was acknowledged is kept: go on with --resume")
                return 130
            if time.monotonic() - last_status > 1.0:
                last_status = time.monotonic()
                self.progress.waits(self._doing())
            self.wake.wait(POLL_S)

    def _check_roles(self) -> None:
        """Raises:
        LaunchError: a role ended by a fault while the trainer needs it.
        """
        if self.roles["trainer"].poll() == 0:
            return
        for name, role in self.roles.items():
            if (status := role.poll()) is not None and (name != "trainer" or status != 0):
                raise self.failed(name, status)

    def _launch_evaluator(self) -> RoleProcess:
        """Kept apart from the other roles: its end ends nothing."""
        self.launch("evaluator")
        return self.roles.pop("evaluator")

    def _doing(self) -> str:
        if self.evals is not None and self.roles["trainer"].poll() == 0:
            return self.evals.waits()
        said = []
        for name in ("trainer", "service"):
            if (url := role_url(self.folder, name)) is not None:
                said.append(role_status(name, url) or f"{name} ends or is busy")
        return "; ".join(said)

    def advice(self, name: str) -> str:
        """See `Crew.advice`."""
        return "Nothing that was acknowledged is lost: go on with --resume."

    def _stop_all(self) -> None:
        """The evaluator first: it calls the others."""
        if self.evals is not None and (role := self.evals.role) is not None:
            role.kill() if self.interrupts > 1 else role.stop(STOP_S["evaluator"])
        super()._stop_all()
