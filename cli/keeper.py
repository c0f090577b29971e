"""The processes of a service without a trainer: an engine, and a service that is started again when it dies.

In: a prepared run folder, a Launcher, and the listening sockets, which this process keeps: callers of a service that is being started again
wait in their queue. Out: exit status 0 once the user stops it, or a LaunchError: the engine ended (its weights ended with it), or the
service ends again and again. It waits for signals and for roles, each of which has a deadline to become ready.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from palestra.cli.config import ServeConfig
from palestra.cli.launch.types import Launcher, LaunchError
from palestra.cli.progress import Progress
from palestra.cli.status import role_status, role_url
from palestra.cli.supervisor import POLL_S, Crew, how_it_ended

STATUS_S = 1.0


@dataclass(slots=True)
class Restarts:
    """How often a role may be started again: `most` times within `window_s` seconds, each time after twice the last pause."""

    most: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.25
    _times: deque[float] = field(default_factory=deque)

    @property
    def made(self) -> int:
        """Restarts within the window, the one that `pause` allowed last included."""
        return len(self._times)

    def pause(self, now: float) -> float | None:
        """Seconds to wait before the next restart, which counts from `now` on; None: there were too many."""
        while self._times and now - self._times[0] >= self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        self._times.append(now)
        return self.first_pause_s * 2.0 ** (len(self._times) - 1)


class Keeper(Crew):
    """Keeps a service up until the user stops it."""

    order = ("engine", "service")
    interrupted = 0

    def __init__(
        self,
        folder: Path,
        config: ServeConfig,
        launcher: Launcher,
        progress: Progress,
        sockets: tuple[int, ...],
        on_ready: Callable[[], None],
    ) -> None:
        """`sockets`: descriptors of the service's listeners. `on_ready` is called once, when it takes calls."""
        super().__init__(folder, config, launcher, progress)
        self.sockets, self.on_ready, self.restarts = sockets, on_ready, Restarts()

    def listeners(self, name: str) -> tuple[int, ...]:
        """See `Crew.listeners`."""
        return self.sockets if name == "service" else ()

    def advice(self, name: str) -> str:
        """See `Crew.advice`."""
        lost = (
            " Weights that were published to it are gone with it: publish them again after the start."
            if name == "engine"
            else ""
        )
        return f"The same command starts it again, with the same store, keys and sessions.{lost}"

    def watch(self) -> int:
        """See `Crew.watch`: until the first interrupt."""
        self.on_ready()
        last_status = 0.0
        while not self.interrupts:
            if (status := self.roles["engine"].poll()) is not None:
                raise self.failed("engine", status)
            if (status := self.roles["service"].poll()) is not None:
                self._restart(status)
            if time.monotonic() - last_status > STATUS_S:
                last_status = time.monotonic()
                self._show()
            self.wake.wait(POLL_S)
        self.progress.say("stopping; the same command goes on")
        return 0

    def _restart(self, status: int) -> None:
        """Starts the service again after a pause. One that ends while it starts is found by the next look, and counts again."""
        pause = self.restarts.pause(time.monotonic())
        if pause is None:
            raise LaunchError(
                f"the service ended {self.restarts.most + 1} times within {self.restarts.window_s:.0f} s, the last time it "
                f"{how_it_ended(status)}. {self.advice('service')}\nIts log: {self.folder / 'log' / 'service.jsonl'}\n"
                f"It last said:\n{self.roles['service'].last_words()}"
            )
        self.progress.say(
            f"the service {how_it_ended(status)}: it is started again in {pause:g} s "
            f"(restart {self.restarts.made} of {self.restarts.most} within {self.restarts.window_s:.0f} s)"
        )
        if self.wake.wait(pause):
            return
        started = time.monotonic()
        self.launch("service")
        if self.until_ready("service") is None and not self.interrupts:
            self.progress.say(f"service ready again in {time.monotonic() - started:.1f} s")

    def _show(self) -> None:
        """The live line. Only on a terminal: elsewhere the load of a service is no news."""
        url = role_url(self.folder, "service")
        if url is not None and self.progress.console.is_terminal:
            self.progress.waits(role_status("service", url, "serve") or "the service is busy")
