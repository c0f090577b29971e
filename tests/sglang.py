"""Two real SGLang engines behind the real router, started once by `palestra engine serve`, for the tests of the `ci` tier.

They live in an environment of their own, `.engine` in the checkout or $PALESTRA_ENGINE_ENV, which `./test.sh --ci` makes. Tests may load
other weights, pause, and kill engines: who needs an engine as it was at the start takes it with `restored`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.jobs import ENV
from tests.live import wait_for
from tests.tinyrun import make_calculator_moe, write_demonstrations

START_S = 240.0
BACK_S = 150.0
"""An engine that died is started again, loads its model and is in the router within this time."""
WINDOW = 2048


@dataclass(frozen=True, slots=True)
class SglangEngines:
    """What runs."""

    router: str
    workers: tuple[str, ...]
    folder: Path
    """The tiny MoE that they were started with; its tokenizer was trained on the calculator's transcripts."""
    other: Path
    """Other weights of the same form."""
    demonstrations: Path
    process: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> dict[str, int]:
        """Name of each engine and of the router -> the pid of its first process, as it is now."""
        said = json.loads(self.announced.read_text())
        return {str(name): int(pid) for name, pid in said["pids"].items()}

    @property
    def announced(self) -> Path:
        """The file in which the command says what it has started."""
        return self.log.with_suffix(".json")

    def words(self) -> str:
        """The end of what the command printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def healthy(self) -> list[str]:
        """Workers that the router would send requests to."""
        try:
            listed: list[dict[str, Any]] = httpx.get(f"{self.router}/workers", timeout=5).json()["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []
        return sorted(worker["url"] for worker in listed if worker["is_healthy"])

    def fresh(self) -> tuple[str, ...]:
        """Both engines, in the router, with the weights that they were started with."""
        for worker in self.workers:
            wait_for(lambda worker=worker: worker in self.healthy(), f"{worker} in the router", BACK_S)
            self.restored(worker)
        return self.workers

    def restored(self, worker: str) -> None:
        """Gives an engine the weights of `folder`, as version 0, and lets it run."""
        body = {"model_path": str(self.folder), "weight_version": "0", "flush_cache": True}
        httpx.post(f"{worker}/continue_generation", json={}, timeout=60).raise_for_status()
        httpx.post(f"{worker}/update_weights_from_disk", json=body, timeout=60).raise_for_status()


def engine_environment() -> Path:
    """The engines' environment.

    Raises:
        AssertionError: there is none.
    """
    folder = Path(os.environ.get("PALESTRA_ENGINE_ENV") or Path(__file__).resolve().parent.parent / ".engine")
    assert (folder / "bin" / "python").exists(), (
        f"{folder} has no engine environment: make one with `.venv/bin/palestra engine install --cpu --into {folder}`"
    )
    return folder


def started(root: Path) -> Iterator[SglangEngines]:
    """Starts them below `root`, and ends them when the caller is done."""
    transcripts = write_demonstrations(root / "demonstrations.jsonl", 4000, noise=0.3, seed=2)
    shape = {"max_position_embeddings": WINDOW, "initializer_range": 0.1}
    folder = make_calculator_moe(root / "model", transcripts, 1, **shape)
    other = make_calculator_moe(root / "other", transcripts, 2, **shape)
    log = root / "engines.log"
    announced = log.with_suffix(".json")
    command = [
        *(sys.executable, "-m", "palestra.cli.main", "engine", "serve", folder, "--num", "2"),
        *("--env", engine_environment(), "--announce", announced, "--context-len", str(WINDOW)),
        *("--max-total-tokens", "16384", "--log", root / "log"),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **ENV}
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            return announced.exists()

        wait_for(ready, "two SGLang engines and their router", START_S)
        said = json.loads(announced.read_text())
        yield SglangEngines(
            said["url"], tuple(said["workers"]), folder, other, root / "demonstrations.jsonl", process, log
        )
    finally:
        _end(process, announced)


def _end(process: subprocess.Popen[bytes], announced: Path) -> None:
    """Ctrl-C; nothing of them may be left. SGLang's processes write their titles over their environment: their sessions tell them."""
    told = json.loads(announced.read_text())["pids"] if announced.exists() else {}
    sessions = {session for pid in told.values() if (session := _session_of(int(pid))) is not None}
    process.send_signal(signal.SIGINT)
    try:
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert status == 0, f"`palestra engine serve` ended with {status}"
    left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) in sessions]
    assert left == [], f"{left} outlived `palestra engine serve`"


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
