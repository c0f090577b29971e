"""Real runs of a tiny model by schedule, for `benchmarks/schedule.py`: the generating side on one core, the trainer on another.

In: a model that was warmed up once. Out: per schedule what its `metrics.jsonl` says. Figures of a machine that others use too, so they are
reported and held to nothing. Waits for the runs' ends, as long as it is told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.jobs import Job
from tests.live import wait_for
from tests.tinyrun import tiny_config

HOME = Path(__file__).resolve().parent.parent / ".bench"
RUN_S, START_S = 600.0, 120.0
SETTLE, LAST = 1, 2
"""Steps at the start that are not counted, as engines and trainer meet their shapes, and at the end, where nothing more is generated."""
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 2},
}
SHOWN = {
    "trained_tokens_per_s": "train/trained_tokens_per_s/mean",
    "step_s": "time/step_s",
    "claim_s": "time/claim_s",
    "train_s": "time/train_s",
    "publish_s": "time/publish_s",
    "trainer_bubble": "bubble/trainer/share",
    "engine_bubble": "bubble/engine/share",
    "overlap": "overlap/generation_train/share",
    "staleness": "staleness/mean",
}
"""What is shown, by its name in `metrics.jsonl`."""


def prepare() -> str:
    """Makes the tiny model that calls its tool, where there is none; says where it is."""
    folder = HOME / "schedule"
    model = folder / "model"
    if (model / "config.json").is_file():
        return f"{model} is there"
    folder.mkdir(parents=True, exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(prefix="palestra-schedule-", dir=folder) as place:
        job = Job(tiny_config(Path(place), sft={"steps": 120, "batch_size": 16}, run={"steps": 1}, optim={"lr": 1e-6}))
        status, out, err = job.train(timeout_s=RUN_S)
        if status:
            raise RuntimeError(f"the warm start ended with {status}:\n{out}{err}")
        (published,) = (job.folder / "weights").glob("v*")
        aside = folder / "model.new"
        shutil.copytree(published, aside, dirs_exist_ok=True)
        aside.rename(model)
    return f"{model} was made"


def measure(steps: int, within_s: float) -> dict[str, Any]:
    """A run per schedule; means over `steps` of its steps. Runs that `within_s` seconds are too short for are cut or left out (null)."""
    prepare()
    until = time.monotonic() + within_s
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": len(cores)}
    for name, schedule in SCHEDULES.items():
        try:
            with tempfile.TemporaryDirectory(prefix="palestra-schedule-") as folder:
                lines = _play(Path(folder), schedule, steps, cores[0], cores[-1], until)
            found[name] = _shown(lines) if lines else None
        except (RuntimeError, AssertionError) as error:  # what was simulated is told nevertheless
            found[name] = {"failed": str(error)}
        print(f"real {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _play(
    folder: Path, schedule: Mapping[str, Any], steps: int, generating: int, training: int, until: float
) -> list[dict[str, Any]]:
    """One run on two cores; its counted steps, as many as there are at `until` (time.monotonic())."""
    if time.monotonic() > until:
        return []
    config = tiny_config(
        HOME / "schedule",
        run={"save_dir": str(folder), "steps": SETTLE + steps + LAST, "save_every": 1000},
        algo={"groups_per_step": 4, "group_size": 8, "max_response": 48},
        rollout={"max_running": 16},
        schedule=dict(schedule),
        train={"threads": 1},
        optim={"lr": 1e-6},
    )
    job = Job(config.model_copy(update={"sft": None}))
    process = job.start()
    try:
        wait_for(lambda: job.pid("trainer"), "the trainer", START_S)
        for said in (job.folder / "roles").glob("*.json"):
            if (pid := job.pid(said.stem)) is not None:
                _move(pid, training if said.stem == "trainer" else generating)
        out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
        if process.returncode:
            raise RuntimeError(f"{dict(schedule)}: the run ended with {process.returncode}:\n{out}{err}")
    except subprocess.TimeoutExpired:
        print(f"{dict(schedule)}: cut, the time is up", file=sys.stderr)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=START_S)
    return job.steps()[SETTLE : SETTLE + steps]


def _move(pid: int, core: int) -> None:
    """All threads of a role of ours to one core; those that it starts later follow."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread), {core})


def _shown(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    return {"steps": len(lines), **{key: _mean(lines, metric) for key, metric in SHOWN.items()}}


def _mean(lines: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Over the steps that have it."""
    values = [float(line[metric]) for line in lines if line.get(metric) is not None]
    return round(statistics.mean(values), 4) if values else None
