"""kill -9 of each role in the middle of a run, then --resume: nothing acknowledged is lost, nothing is trained twice (laws 3 and 6)."""

from __future__ import annotations

import random
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


def kill_in_the_middle(job: Job, role: str, seed: int) -> None:
    """Lets the run come to a random turn after its first step, then kills the role; the supervisor says so and ends."""
    after = random.Random(seed).randrange(1, 2 * 8)  # of the 3 steps of 8 turns that are left
    process = job.start()
    try:
        wait_for(lambda: job.steps() or process.poll() is not None, "the first step", 120)
        assert process.poll() is None, process.communicate()
        reader = StoreReader(job.folder / "store")
        at = sum(session.turns for session in reader.read_sessions())
        wait_for(lambda: sum(session.turns for session in reader.read_sessions()) >= at + after, "more turns", 60)
        job.kill(role)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, out + err
    assert f"{role} was ended by signal 9" in err
    assert "--resume" in err
    assert job.leftovers() == []


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
@pytest.mark.parametrize(("role", "seed"), [("engine", 1), ("service", 2), ("worker", 3), ("trainer", 4)])
def test_a_killed_role_and_resume(base: Path, role: str, seed: int) -> None:
    job = make_job(base, f"{role}-{seed}")
    kill_in_the_middle(job, role, seed)
    resume_and_check(job)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sync", "one_step_off"])
@pytest.mark.parametrize("seed", range(5, 9))
@pytest.mark.parametrize("role", ["engine", "service", "worker", "trainer"])
def test_a_killed_role_and_resume_at_many_points(base: Path, role: str, seed: int, kind: str) -> None:
    job = make_job(base, f"{role}-{kind}-{seed}", schedule={"kind": kind})
    kill_in_the_middle(job, role, seed)
    resume_and_check(job)


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
