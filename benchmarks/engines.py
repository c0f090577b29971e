"""Two real SGLang engines for benchmarks, and routers in front of them.

In: a model folder. Out: engines that run on after `--setup` and are found by later calls, as processes on record below `.bench/`; a router
of any policy for the length of a block. It waits for pip, and for processes to become ready, each with a deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gateway_procs import Process, ProcessDesk
from palestra.cli.engines.commands import engine_commands, router_command
from palestra.cli.engines.environment import VARIABLE, find
from palestra.cli.engines.options import known
from palestra.cli.engines.ports import free_ports
from palestra.cli.engines.probes import router_lacks
from palestra.cli.engines.types import EngineCommand, EngineEnvironment, EngineGroup, EngineSetupError, Topology
from palestra.server.workers.types import EnginePlace

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench"
START_S, ROUTER_S = 240.0, 60.0


class Engines:
    """Engines of one benchmark, named by it."""

    def __init__(self, name: str, model: Path, *, number: int = 2, options: dict[str, object] | None = None) -> None:
        self.home = HOME / name
        self.home.mkdir(parents=True, exist_ok=True)
        (HOME / ".gitignore").write_text("*\n")
        self.desk = ProcessDesk(self.home / "run")
        self.model, self.number, self.options = model, number, options or {}
        self.environment: EngineEnvironment | None = None
        self._started: list[Process] = []
        self.urls: list[str] = []

    def install(self) -> None:
        """The engines' environment: what PALESTRA_ENGINE_ENV names, or .engine in the checkout, made where it is not whole."""
        place = os.environ.get(VARIABLE) or str(ROOT / ".engine")
        try:
            self.environment = find(place)
        except EngineSetupError:
            command = [sys.executable, "-m", "palestra.cli.main", "engine", "install", "--cpu", "--into", place]
            subprocess.run(command, check=True, stdout=sys.stderr)
            self.environment = find(place)

    def start(self) -> None:
        """Starts what does not run yet.

        Raises:
            RuntimeError: an engine did not become ready.
        """
        assert self.environment is not None, "install comes first"
        options = {"page_size": 1, "enable_metrics": True, **self.options}
        topology = Topology((EngineGroup("regular", self.number, 1, options),))
        ports = iter(free_ports("127.0.0.1", 4 * self.number))
        fields = known(self.environment, "sglang")
        commands = engine_commands(topology, self.model, self.environment, ports, fields=fields)
        for command in commands:
            found = self.desk.find(command.name)
            if found is None:
                print(f"starting {command.name}", file=sys.stderr, flush=True)
                found = self.desk.start(command.name, command.argv, url=command.url, more=command.env, ready_s=START_S)
                self._started.append(found)
            self.urls.append(found.url)

    def leave_running(self) -> None:
        """What was started stays for later calls."""
        self._started.clear()

    def stop(self) -> None:
        """Ends what this call has started."""
        while self._started:
            self.desk.end(self._started.pop())

    @contextmanager
    def router(self, policy: str) -> Iterator[EnginePlace]:
        """sglang-router with a policy, in front of all engines, while the block runs."""
        assert self.environment is not None, "install comes first"
        port, prometheus = free_ports("127.0.0.1", 2)
        engines = [EngineCommand(f"engine-{i}", (), {}, url) for i, url in zip(count(), self.urls, strict=False)]
        command = router_command(
            engines, self.environment, port=port, prometheus_port=prometheus, policy=policy, startup_s=ROUTER_S
        )
        process = self.desk.start(f"router-{policy}", command.argv, url=command.url, more=command.env, ready_s=ROUTER_S)
        try:
            _wait_for_workers(command.url, self.urls)
            yield EnginePlace(command.url, tuple(self.urls), router=True, kind="sglang")
        finally:
            self.desk.end(process)


def _wait_for_workers(router: str, workers: Sequence[str]) -> None:
    deadline = time.monotonic() + ROUTER_S
    while (lacking := router_lacks(router, workers, timeout_s=5.0)) != []:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the router lacks {lacking or 'an answer'} after {ROUTER_S:.0f} s")
        time.sleep(0.1)


def main(
    argv: list[str] | None,
    about: str,
    name: str,
    prepare: Callable[[], Engines],
    measure: Callable[[Engines, int], dict[str, Any]],
    rounds: int,
) -> int:
    """The command line of a benchmark on engines; the exit status. `name`: its folder below HOME;
    `rounds`: of a measurement that is not quick."""
    parser = argparse.ArgumentParser(description=about)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--setup", action="store_true", help="install the engines and start them")
    what.add_argument("--quick", action="store_true", help="measure within four minutes")
    what.add_argument("--teardown", action="store_true", help="end what --setup started")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    if options.teardown:
        print(json.dumps({"ended": ProcessDesk(HOME / name / "run").end_all()}))
        return 0
    engines = prepare()
    try:
        engines.install()
        engines.start()
        if options.setup:
            engines.leave_running()
            print(json.dumps({"engines": engines.urls}))
            return 0
        report = measure(engines, 1 if options.quick else rounds)
    finally:
        engines.stop()
    print(json.dumps(report))
    return 0
