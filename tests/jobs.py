"""Whole jobs for tests: `palestra train` as a process, its run folder, and killing its roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.cli.config import RunConfig, dump_toml
from palestra.server.buffer.opening import open_buffer_reader
from palestra.server.ledger import Ledger, read_ledger
from palestra.server.types import GroupState
from tests.live import wait_for

ENV = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}


def start(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A palestra command as a process, its output captured."""
    return subprocess.Popen(
        [sys.executable, "-m", "palestra.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENV, **(env or {})},
    )


def palestra(
    *arguments: str | Path, timeout_s: float = 300.0, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Runs a palestra command to its end: exit status, stdout, stderr."""
    process = start(*arguments, env=env)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


class Job:
    """One training job below a folder."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = config.folder
        self.file = self.folder.parent / f"{config.run.name}.toml"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(dump_toml(config))

    def train(self, *more: str, timeout_s: float = 300.0, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """To its end."""
        return palestra("train", self.file, *more, timeout_s=timeout_s, env=env)

    def start(self, *more: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """In the background."""
        return start("train", self.file, *more, env=env)

    def pid(self, role: str) -> int | None:
        """The role's pid once it announced itself."""
        try:
            return int(json.loads((self.folder / "roles" / f"{role}.json").read_text())["pid"])
        except (OSError, ValueError, KeyError):
            return None

    def kill(self, role: str) -> None:
        """SIGKILL."""
        pid = wait_for(lambda: self.pid(role), f"role {role}")
        os.kill(pid, signal.SIGKILL)

    def steps(self) -> list[dict[str, Any]]:
        """Training lines of metrics.jsonl, in the order they were written."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if "train_step" in entry]

    def ledger(self, over: bool = True) -> Ledger:
        """Where the tokens went."""
        return read_ledger(self.folder / "store", run_over=over)

    def committed(self) -> dict[str, int]:
        """Group -> step it was trained in."""
        reader = open_buffer_reader(self.folder / "store")
        try:
            entries = reader.entries()
        finally:
            reader.close()
        return {e.group_id: int(e.step or 0) for e in entries if e.state is GroupState.COMMITTED}

    def leftovers(self) -> list[int]:
        """Pids of this job that are still there."""
        pids: list[int] = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.folder / "run.toml").encode() in command:
                pids.append(int(path.parent.name))
        return pids


def check_laws(job: Job, steps: int) -> None:
    """Laws 3 and 6 on a finished job: the ledger balances, and every step trained its own groups, each group once."""
    ledger = job.ledger()
    assert ledger.balanced, ledger.lines()
    assert ledger.pending == 0
    per_step: dict[int, int] = {}
    for step in job.committed().values():
        per_step[step] = per_step.get(step, 0) + 1
    full = job.config.algo.groups_per_step
    if job.config.schedule.partial == "off":
        assert per_step == dict.fromkeys(range(1, steps + 1), full)
    else:
        assert sorted(per_step) == list(range(1, steps + 1))
        assert all(1 <= groups <= full for groups in per_step.values())
    assert job.leftovers() == []
