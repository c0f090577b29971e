"""Everything that runs during the benchmark, and the folder that it lives in.

In: the commands of `gateway.py`. Out: a `Stage`: mock engine, service and peers up, each a process of its own; jobs for the load generator.
What an earlier `--setup` started is used and left running; what the stage starts itself it ends. It waits for pip and for processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gateway_load import Job
from benchmarks.gateway_peers import PEERS, Peer, free_port
from benchmarks.gateway_procs import Process, ProcessDesk
from benchmarks.gateway_texts import BUILD, Texts, make_texts

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench"
TOKEN = "benchmark"
LOAD_S = 900.0
"""The longest job, seconds."""
FRESH = "palestra-fresh"
NUMBERS = 1 << 27
"""Different first prompts. A job takes its own by the clock, a thousand a second, which is more than any job uses: no service saw them."""


class Stage:
    """The benchmark's processes."""

    def __init__(self, home: Path = HOME) -> None:
        self.home = home
        self.run = home / "run"
        self.desk = ProcessDesk(self.run)
        # Everything here is made by a command: nothing of it belongs under version control.
        (home / ".gitignore").write_text("*\n")
        self.up: dict[str, Process] = {}
        self.wanted: dict[Path, dict[str, tuple[int, int]]] = {}
        """By store: the tags of jobs, with how many sessions each has and how many turns a session."""
        self._started: list[Process] = []
        self._service = "palestra"

    @property
    def texts_path(self) -> Path:
        """Where the texts lie."""
        return self.home / f"texts-{BUILD}.json"

    @property
    def texts(self) -> Texts:
        """What agents and engine say."""
        return Texts.load(self.texts_path)

    def install(self) -> None:
        """Peers and texts, where they are missing."""
        for peer in PEERS:
            if not peer.installed(self.home / "peers"):
                print(f"installing {peer.name} {peer.version}", file=sys.stderr, flush=True)
                peer.install(self.home / "peers")
        model = _model()
        if not self.texts_path.exists() or self.texts.model != str(model):
            make_texts(model, self.texts_path)

    def start(self) -> None:
        """Starts what does not run yet.

        Raises:
            RuntimeError: a process did not become ready.
        """
        self._up("mock", str(self.texts_path))
        self._service_process("palestra")
        for peer in PEERS:
            self.up[peer.name] = self.desk.find(peer.name) or self._peer(peer)

    def stop(self) -> None:
        """Ends what this stage has started, and deletes the stores of services that are gone."""
        while self._started:
            self.desk.end(self._started.pop())
        for store in self.run.glob("*.store"):
            if self.desk.find(store.stem) is None:
                shutil.rmtree(store)

    @contextmanager
    def fresh_service(self) -> Iterator[None]:
        """A service process that nobody has used, which jobs for palestra go to meanwhile; it ends with the block."""
        used = self.run / f"{FRESH}.used"
        if used.exists() and (left := self.desk.find(FRESH)) is not None:
            self.desk.end(left)  # of a run that was killed
        made = self._service_process(FRESH)
        used.touch()
        old, self._service = self._service, FRESH
        try:
            yield
        finally:
            self._service = old
            self._started = [process for process in self._started if process != made]
            self.desk.end(made)
            used.unlink()

    def load(self, gateway: str, *, sessions: int, rounds: int = 1, turns: int = 8, **more: Any) -> dict[str, Any]:
        """Has the load generator do one job; its result.

        Raises:
            RuntimeError: it failed.
        """
        name = self._service if gateway == "palestra" else gateway
        target, tag = self.up[name], f"b{os.getpid()}-{time.monotonic_ns()}"
        count = sessions * rounds
        job = Job(
            gateway=gateway,
            url=target.url,
            pid=target.pid,
            engine=self.up["mock"].url,
            token=TOKEN,
            tag=tag,
            number=int(time.time() * 1000) % NUMBERS,
            sessions=sessions,
            rounds=rounds,
            turns=turns,
            **more,
        )
        command = [*_role("load"), str(self.texts_path)]
        done = subprocess.run(command, input=orjson.dumps(asdict(job)), capture_output=True, timeout=LOAD_S)
        if done.returncode:
            raise RuntimeError(f"the load generator failed on {gateway}:\n{done.stderr.decode()[-2000:]}")
        result: dict[str, Any] = orjson.loads(done.stdout)
        if gateway == "palestra" and not result["errors"]:
            self.wanted.setdefault(self.store(name), {})[tag] = (count, turns)
        return result

    def store(self, name: str) -> Path:
        """The store folder of a service."""
        return self.run / f"{name}.store"

    def _service_process(self, name: str) -> Process:
        if self.desk.find(name) is None:
            shutil.rmtree(self.store(name), ignore_errors=True)
        return self._up(name, str(self.store(name)), self.texts.model, self.up["mock"].url, TOKEN, role="service")

    def _up(self, name: str, *arguments: str, role: str | None = None) -> Process:
        found = self.desk.find(name)
        if found is None:
            command = [*_role(role or name), str(self.run / f"{name}.url"), *arguments]
            found = self.desk.start(name, command)
            self._started.append(found)
        self.up[name] = found
        return found

    def _peer(self, peer: Peer) -> Process:
        (self.run / f"{peer.name}.db").unlink(missing_ok=True)  # of a former run
        port = free_port()
        command = peer.command(self.home / "peers", self.up["mock"].url, self.run, port)
        made = self.desk.start(peer.name, command, url=f"http://127.0.0.1:{port}")
        self._started.append(made)
        return made

    def leave_running(self) -> None:
        """`stop` ends nothing of what runs now, nor the service that the next run finds fresh."""
        self._service_process(FRESH)
        self._started.clear()

    @staticmethod
    def machine() -> dict[str, Any]:
        """What the figures were taken on."""
        return {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "python": sys.version.split()[0]}


def _role(name: str) -> Sequence[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "gateway.py"), "--role", name]


def _model() -> Path:
    """SmolLM2's tokenizer as a model folder."""
    from tests.tokenizers import cached, smollm2_folder

    return cached(smollm2_folder)
