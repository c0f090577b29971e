"""One supervised process of a fleet, an engine or the router: started, looked at, started again when it dies or freezes.

In: its command, two looks (is it ready? is it alive?) and a clock. Out: lines for a person and events for the record. `step` never waits:
looks run on the fleet's threads, and their results are collected by the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.cli.engines.child import GRACE_S, Child, shell_line
from palestra.cli.engines.probes import PoolSizes
from palestra.cli.engines.types import EngineCommand
from palestra.cli.engines.words import exception, failure, phase
from palestra.cli.keeper import Restarts


class FleetError(Exception):
    """Engines that did not start, or that end again and again; the message says which, why, and the command to try by hand."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a fleet waits for what, seconds."""

    start_s: float
    """From the start of a process until it answers."""
    grace_s: float = GRACE_S["cuda"]
    """Between SIGTERM and SIGKILL."""
    poll_s: float = 0.25
    """Between steps."""
    look_s: float = 0.5
    """Between two looks at what starts."""
    watch_s: float = 5.0
    """Between two looks at what runs."""
    answer_s: float = 5.0
    """For one answer."""
    frozen_s: float = 120.0
    """Without any answer, and not under a debugger: then it is killed and started again."""
    window_s: float = 600.0
    """Within which `restarts` are counted."""
    restarts: int = 5
    """As often a process may be started again within `window_s`."""
    pause_s: float = 1.0
    """Before the first restart of an engine; each next one waits twice as long."""


@dataclass(frozen=True, slots=True)
class Looks:
    """How to look at a process. All get the seconds that an answer may take, and are called on another thread."""

    ready: Callable[[float], PoolSizes | bool | None]
    """Something true once it may have requests; an engine's pools."""
    again: Callable[[float], PoolSizes | bool | None]
    """The same of one that was ready before and was started again: others use it already, and may have paused it."""
    alive: Callable[[float], bool]
    """Whether it answers."""
    doing: Callable[[], str] | None = None
    """What it does while it starts; None: its log says so, as SGLang writes it."""


Tell = Callable[[str, str, str, dict[str, Any]], None]
"""Gets the process's name, the event, a line for a person ("" for none) and what else belongs on record."""


@dataclass(slots=True)
class Part:
    """A process and what is known of it. Times are of the clock that `step` is given."""

    command: EngineCommand
    folder: Path
    looks: Looks | None
    """None: it answers nowhere (a further node of an engine) and counts as ready once it runs."""
    patience: Patience
    tell: Tell
    threads: Executor
    restarts: Restarts
    spawn: Callable[[EngineCommand, Path, float], Child] = Child
    child: Child | None = None
    ready: bool = False
    pools: PoolSizes | None = None
    ever_ready: bool = False
    """False: a fault ends the fleet, since it would come again."""
    _began: float = 0.0
    _answered: float = 0.0
    _missed: int = 0
    _due: float | None = None
    """When it is started again."""
    _look: Future[PoolSizes | bool | None] | None = field(default=None, repr=False)
    _next_look: float = 0.0

    def launch(self, now: float) -> None:
        """Starts the process.

        Raises:
            FleetError: the machine has no room for another process or file.
        """
        self._due, self._look, self.ready, self._missed = None, None, False, 0
        try:
            self.child = self.spawn(self.command, self.folder, self.patience.grace_s)
        except OSError as error:
            raise FleetError(f"{self.command.name} cannot be started: {error}") from error
        self._began = self._next_look = now
        self.tell(self.command.name, "started", "", {"argv": list(self.command.argv)})

    def step(self, now: float) -> None:
        """Looks after it.

        Raises:
            FleetError: it did not become ready at its first start, or was started again too often.
        """
        if self._due is not None and now >= self._due:
            self.launch(now)
        if self.child is None:
            return
        if (how := self.child.poll()) is not None:
            self._over(how if self.ever_ready else f"{how} while it started", now)
        elif not self.ready and now - self._began > self.patience.start_s:
            self._put_down(f"was not ready within {self.patience.start_s:.0f} s", now)
        else:
            self._collect(now)

    def doing(self) -> str:
        """What it does while it starts."""
        if self.child is None:
            return "waits for its next start"
        return self.looks.doing() if self.looks is not None and self.looks.doing else phase(self.child.log_end())

    def _collect(self, now: float) -> None:
        """Takes the result of the last look, and starts the next one when it is time."""
        if self.looks is None:
            if not self.ready:
                self._is_ready(True, now)
            return
        if self._look is None:
            if now >= self._next_look:
                ready = self.looks.again if self.ever_ready else self.looks.ready
                look = self.looks.alive if self.ready else ready
                self._look = self.threads.submit(look, self.patience.answer_s)
            return
        if not self._look.done():
            return
        found, self._look = self._look.result(), None
        self._next_look = now + (self.patience.watch_s if self.ready else self.patience.look_s)
        if not self.ready:
            if found:
                self._is_ready(found, now)
        elif found:
            self._answered, self._missed = now, 0
        else:
            self._missed += 1
            self._perhaps_frozen(now)

    def _is_ready(self, found: PoolSizes | bool, now: float) -> None:
        self.pools = found if isinstance(found, PoolSizes) else None
        again = " again" if self.ever_ready else ""
        self.ready, self.ever_ready, self._answered = True, True, now
        self._next_look = now + self.patience.watch_s
        seconds = now - self._began
        sizes = f": {self.pools}" if self.pools is not None else ""
        line = f"{self.command.name} ready{again} in {seconds:.1f} s{sizes}"
        self.tell(self.command.name, "ready", line, {"seconds": round(seconds, 1)})

    def _perhaps_frozen(self, now: float) -> None:
        """One missed answer may be ours: this process may have stood still itself. Several, over a long time, are not."""
        silent = now - self._answered
        if silent < self.patience.frozen_s or self._missed < 3 or self.child is None:
            return
        if self.child.debugged():
            self._answered = now
            self.tell(self.command.name, "debugged", f"{self.command.name} is silent under a debugger: left alone", {})
            return
        self._put_down(f"gave no answer for {silent:.0f} s", now)

    def _put_down(self, why: str, now: float) -> None:
        if self.child is not None:
            excerpt = self.child.log_end()
            self.child.kill()
            self.child.wait()
            self._over(why, now, excerpt)

    def _over(self, how: str, now: float, log: str | None = None) -> None:
        """It has ended: the next start is set, or there is none."""
        name, child = self.command.name, self.child
        assert child is not None
        log = child.log_end() if log is None else log
        self.child, self.ready, self._look = None, False, None
        self.tell(name, "ended", "", {"how": how, "last": failure(log)})
        if not self.ever_ready:
            raise FleetError(self._message(how, log, child.log))
        pause = self.restarts.pause(now)
        if pause is None:
            often = f"ended {self.restarts.most + 1} times within {self.restarts.window_s / 60:.0f} min, the last time it {how}"
            raise FleetError(self._message(often, log, child.log))
        self._due = now + pause
        why = f" after {fault}" if (fault := exception(log)) else ""
        line = (
            f"{name} {how}{why}: it is started again in {pause:g} s (restart {self.restarts.made} of {self.restarts.most} within "
            f"{self.restarts.window_s / 60:.0f} min); its log: {child.log}"
        )
        self.tell(name, "restarts", line, {"pause_s": pause})

    def _message(self, what: str, log: str, path: Path) -> str:
        return f"{self.command.name} {what}:\n{failure(log)}\nIts log: {path}\nTo try it by hand:\n{shell_line(self.command)}"
