"""A run that ends early, by its supervisor's death or the user's wish, goes on with --resume: nothing acknowledged is lost, nothing is
trained twice (laws 3 and 6). Kills of single parts are in `test_kill_matrix.py`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from palestra.server.store.reader import StoreReader
from palestra.server.store.types import SessionState
from tests.jobs import Job, check_laws
from tests.live import wait_for
from tests.tinyrun import tiny_config

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is; every job has a folder of its own beside it."""
    return tmp_path_factory.mktemp("crash")


def make_job(base: Path, name: str, **tables: dict[str, Any]) -> Job:
    """A run without a warm start: it is about books, not about learning."""
    config = tiny_config(base, run={"name": name, "steps": STEPS, "save_every": 2}, **tables)
    return Job(config.model_copy(update={"sft": None}))


def resume_and_check(job: Job) -> None:
    """The run goes on to its end; what had been acknowledged is accounted for."""
    reader = StoreReader(job.folder / "store")
    before = {(s.record.rollout_id, s.record.attempt): s.sampled_tokens for s in reader.read_sessions()}
    closed = {key.record.rollout_id for key in reader.read_sessions(state=SessionState.CLOSED)}
    status, out, err = job.train("--resume")
    assert status == 0, out + err
    check_laws(job, STEPS)
    after = {(s.record.rollout_id, s.record.attempt): s.sampled_tokens for s in reader.read_sessions()}
    assert all(after.get(key, -1) >= tokens for key, tokens in before.items()), "an acknowledged turn is gone"
    assert closed <= {rollout_id for rollout_id, _ in after}


@pytest.mark.walk
@pytest.mark.timeout(400)
def test_killed_supervisor_takes_its_roles_along(base: Path) -> None:
    job = make_job(base, "supervisor")
    process = job.start()
    wait_for(lambda: job.steps(), "the first step", 120)
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: job.leftovers() == [], "the end of the roles", 30)
    resume_and_check(job)


@pytest.mark.walk
@pytest.mark.timeout(400)
def test_interrupt_stops_after_the_step_and_resume_goes_on(base: Path) -> None:
    job = make_job(base, "interrupt", schedule={"kind": "one_step_off"})
    process = job.start()
    try:
        wait_for(lambda: job.steps(), "the first step", 120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert "stopping after this step" in out
    assert job.leftovers() == []
    assert 1 <= len(job.steps()) < STEPS
    assert job.ledger(over=False).balanced
    resume_and_check(job)
