"""Runs commands of the engines' environment: short questions, and the long steps of its installation.

In: an interpreter or an environment. Out: what it printed, or an error with its last words. Waits for each at most as long as it says.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from palestra.cli.engines.environment import python_env
from palestra.cli.engines.types import EngineEnvironment, EngineSetupError

LOG = "install.log"
"""In the environment's folder: what the present step prints."""
STEP_S = 3600.0
"""The longest that one step may take, seconds."""
TICK_S = 15.0
"""How often a step that takes long says what it is at, seconds."""


def runs(python: Path) -> bool:
    """Whether an interpreter starts."""
    try:
        return subprocess.run([str(python), "-S", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def ask(environment: EngineEnvironment, arguments: Sequence[str], timeout_s: float) -> str:
    """What the environment's Python prints when it is given `arguments`; waits `timeout_s` seconds at most.

    Raises:
        EngineSetupError: it failed, or did not end in time.
    """
    command = [str(environment.python), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **python_env(environment)}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineSetupError(f"{environment.python} does not answer: {error}") from None
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-8:])
        raise EngineSetupError(f"{environment.folder} does not work; its Python said:\n  {last}")
    return done.stdout


def run_step(
    command: Sequence[str], what: str, folder: Path, say: Callable[[str], None], told: Mapping[str, str] | None = None
) -> None:
    """Runs one step with its output in the log, saying now and then what the last line of it is.

    Raises:
        EngineSetupError: it failed, or took longer than a step may.
    """
    log, started, heard = folder / LOG, time.monotonic(), ""
    environ = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1", **(told or {})}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environ
        )
        try:
            while True:
                try:
                    status = process.wait(TICK_S)
                    break
                except subprocess.TimeoutExpired:
                    took = time.monotonic() - started
                    if took > STEP_S:
                        raise EngineSetupError(f"{what} took longer than {STEP_S:.0f} s and was given up") from None
                    last = next(iter(reversed(lines(log))), "")
                    if last != heard:
                        say(f"      {took:.0f} s: {last.strip()[:120]}")
                    heard = last
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status:
        words = "\n  ".join(lines(log)[-12:])
        raise EngineSetupError(f"{what} failed (status {status}); run the same command to go on. It said:\n  {words}")


def lines(log: Path) -> list[str]:
    """The lines of a log that say something."""
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
