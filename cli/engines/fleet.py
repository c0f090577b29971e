"""Engines and the router in front of them as processes: started together, kept running, ended without a trace.

In: their commands and a folder for logs. Out: ready URLs with the engines' real pool sizes, lines of progress, and `engines.jsonl` with
every event. `start` and `watch` wait for the processes and for the event that stops them; each process has a deadline to become ready.
An engine that was started again has the weights it was started with: whoever publishes weights brings it up to date.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from palestra.cli.engines.child import GRACE_S, shell_line, stop_all
from palestra.cli.engines.part import FleetError, Looks, Part, Patience
from palestra.cli.engines.probes import PoolSizes, engine_alive, engine_ready, pool_sizes, router_alive, router_lacks
from palestra.cli.engines.types import EngineCommand
from palestra.cli.keeper import Restarts

EVENTS = "engines.jsonl"
"""File in the log folder: one JSON object an event."""
PROGRESS_S, NEWS_S = 10.0, 2.0
"""Between two lines that say the same of a wait, and between any two."""
NAMED = 4
"""As many processes are named in a line of progress; of more, how many do what."""


class EngineFleet:
    """All processes of one set of engines on this host. A context: nothing of them is left after it."""

    def __init__(
        self,
        commands: Sequence[EngineCommand],
        router: EngineCommand | None,
        log_dir: Path,
        *,
        start_deadline_s: float,
        say: Callable[[str], None],
        external: Sequence[str] = (),
        device: Literal["cpu", "cuda"] = "cuda",
        patience: Patience | None = None,
    ) -> None:
        """`start_deadline_s`: seconds until all is ready. `say` gets lines for a person. `external`: URLs of engines that others run and
        that the router has too. `device`: what the engines compute on. `patience`: other waits than the usual ones."""
        self._patience = patience or Patience(start_deadline_s, grace_s=GRACE_S[device])
        self._deadline_s, self._say = start_deadline_s, say
        log_dir.mkdir(parents=True, exist_ok=True)
        self._events = (log_dir / EVENTS).open("a", encoding="utf-8")
        self._elsewhere = [command for command in commands if command.node != 0]
        here = [command for command in commands if command.node == 0]
        self._external = (*external, *(command.url for command in self._elsewhere if command.url))
        self._lacks: list[str] | None = None
        self._threads = ThreadPoolExecutor(min(32, len(here) + 1), thread_name_prefix="engine-look")
        self.engines = [self._part(command, log_dir, _looks_at_engine(command.url)) for command in here]
        self.router = None
        if router is not None:
            url = router.url
            ready, again = partial(self._router_ready, url), partial(self._router_again, url)
            looks = Looks(ready, again, partial(router_alive, url), self._router_doing)
            self.router = self._part(router, log_dir, looks)

    @property
    def url(self) -> str:
        """Where requests go: the router, or the only engine."""
        return self.router.command.url if self.router is not None else self.workers[0]

    @property
    def workers(self) -> list[str]:
        """The engines' URLs, those of others included."""
        return [*(part.command.url for part in self.engines if part.command.url), *self._external]

    @property
    def pools(self) -> dict[str, PoolSizes]:
        """What each engine that we started said of its pools, by URL."""
        return {part.command.url: part.pools for part in self.engines if part.pools is not None}

    @property
    def pids(self) -> dict[str, int]:
        """The first process of each, by name, of those that run."""
        running = {part.command.name: part.child.pids() for part in self._parts() if part.child is not None}
        return {name: found[0] for name, found in running.items() if found}

    def __enter__(self) -> EngineFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, stop: threading.Event) -> bool:
        """Starts all engines at once, then the router; returns when all are ready, or False when `stop` was set before.

        Raises:
            FleetError: one of them ended, or was not ready in time.
        """
        deadline = time.monotonic() + self._deadline_s
        for command in self._elsewhere:
            self._say(f"{command.name} belongs on host {command.node}; start it there:\n{shell_line(command)}")
        for wave in (self.engines, [self.router] if self.router is not None else []):
            for part in wave:
                part.launch(time.monotonic())
            if not self._until_ready(wave, deadline, stop):
                return False
        return not stop.is_set()

    def watch(self, stop: threading.Event, changed: Callable[[], None] | None = None) -> None:
        """Keeps all of them running until `stop` is set; calls `changed` when all are ready again after some were not.

        Raises:
            FleetError: one of them ends again and again.
        """
        whole = True
        while not stop.is_set():
            for part in self._parts():
                part.step(time.monotonic())
            was, whole = whole, all(part.ready for part in self._parts())
            if whole and not was and changed is not None:
                changed()
            stop.wait(self._patience.poll_s)

    def stop(self) -> None:
        """Ends all of them: asked first, killed after the grace. Can be repeated."""
        stop_all([part.child for part in self._parts() if part.child is not None])
        for part in self._parts():
            if part.child is not None:
                self._tell(part.command.name, "stopped", "", {"how": part.child.poll()})
                part.child = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._events.close()

    def kill(self) -> None:
        """Ends all of them at once, for `stop` to collect. May be called from a signal handler."""
        for part in self._parts():
            if part.child is not None:
                part.child.kill()

    def _parts(self) -> list[Part]:
        return [*self.engines, *([self.router] if self.router is not None else [])]

    def _part(self, command: EngineCommand, folder: Path, looks: Looks | None) -> Part:
        patience = self._patience
        # Nobody can reach anything without the router, and it starts quickly: it waits least.
        pause = patience.pause_s / 8 if command.kind == "router" else patience.pause_s
        restarts = Restarts(patience.restarts, patience.window_s, pause)
        return Part(command, folder, looks, patience, self._tell, self._threads, restarts)

    def _until_ready(self, parts: Sequence[Part], deadline: float, stop: threading.Event) -> bool:
        began = told_at = time.monotonic()
        told = ""
        while not stop.is_set():
            now = time.monotonic()
            for part in self._parts():
                part.step(now)
            late = [part for part in parts if not part.ready]
            if not late:
                return True
            if now > deadline:
                raise FleetError(
                    f"not ready within {self._deadline_s:.0f} s: {_doing(late)}; see their logs in {late[0].folder}"
                )
            if now - told_at > NEWS_S and ((doing := _doing(late)) != told or now - told_at > PROGRESS_S):
                told, told_at = doing, now
                self._say(f"  ... {doing}, {now - began:.0f} s")
            stop.wait(self._patience.poll_s)
        return False

    def _router_ready(self, url: str, timeout_s: float) -> bool:
        """Whether it lists all engines as healthy."""
        self._lacks = router_lacks(url, self.workers, timeout_s)
        return self._lacks == []

    def _router_again(self, url: str, timeout_s: float) -> bool:
        """Whether it lists one of them. The others may be down themselves, and it finds them when they are back."""
        self._lacks = router_lacks(url, self.workers, timeout_s)
        return self._lacks is not None and len(self._lacks) < len(self.workers)

    def _router_doing(self) -> str:
        return f"looks for {', '.join(self._lacks)}" if self._lacks else "starts"

    def _tell(self, name: str, event: str, line: str, more: dict[str, Any]) -> None:
        if not self._events.closed:
            record = {"at": round(time.time(), 3), "engine": name, "event": event, **more}
            self._events.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._events.flush()
        if line:
            self._say(line)


def _looks_at_engine(url: str) -> Looks | None:
    if not url:
        return None
    return Looks(partial(engine_ready, url), partial(pool_sizes, url), partial(engine_alive, url))


def _doing(parts: Sequence[Part]) -> str:
    """What those that are not ready do, in one line."""
    if len(parts) <= NAMED:
        return "; ".join(f"{part.command.name} {part.doing()}" for part in parts)
    return "; ".join(
        f"{count} engines: {doing}" for doing, count in Counter(part.doing() for part in parts).most_common()
    )
