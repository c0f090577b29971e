"""The whole journey on a CPU: a job from its configuration to trained weights, through every real part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from palestra.server.rows import trajectory_rows
from palestra.server.store.reader import StoreReader
from palestra.server.store.types import SessionState
from palestra.server.types import TokenSource
from palestra.trainer.records import read_step
from tests.jobs import Job, check_laws, palestra
from tests.live import wait_for
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.walk, pytest.mark.timeout(420)]

FAULTY = '''
from palestra.envs.calculator import Calculator
from palestra.envs.registry import register
from palestra.envs.tools import tool
from palestra.envs.types import ToolError


@register("walk/Faulty-v0")
class Faulty(Calculator):
    """Every third task's tool says no, every third task's grader breaks; the others are as they should be."""

    def kind(self):
        return int(self.task.id.rsplit("/", 1)[1]) % 3

    @tool
    def calculator(self, expression: str) -> int:
        """Computes + - * and parentheses."""
        if self.kind() == 0:
            raise ToolError("the calculator is out of order")
        return super().calculator(expression)

    def score(self, task, transcript):
        if self.kind() == 1:
            raise RuntimeError("the grader broke")
        return super().score(task, transcript)
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run of two steps after a warm start."""
    folder = tmp_path_factory.mktemp("walk")
    # At this rate the weights stay those of the warm start, so that later tests can count on tool calls.
    tables = {"sft": {"steps": 120, "batch_size": 16}, "run": {"keep_checkpoints": 1}, "optim": {"lr": 1e-6}}
    job = Job(tiny_config(folder, **tables))
    status, out, err = job.train()
    assert status == 0, out + err
    assert "the ledger balances" in out
    return job


@pytest.fixture(scope="module")
def warm_model(job: Job) -> Path:
    """The weights that the run published last: a model folder that makes tool calls."""
    (folder,) = (job.folder / "weights").glob("v*")
    return folder


def test_every_step_trains_its_groups_once_and_the_ledger_balances(job: Job) -> None:
    check_laws(job, steps=2)
    assert [entry["train_step"] for entry in job.steps()] == [1, 2]


def test_law_8_trainer_and_engine_agree_and_the_first_ratio_is_one(job: Job) -> None:
    for entry in job.steps():
        assert entry["train/abs_dlogp/max"] < 1e-4
        assert abs(entry["train/ratio/max"] - 1) < 1e-4
        assert abs(entry["train/approx_kl/mean"]) < 1e-6
        assert entry["staleness/max"] == 0


def test_laws_1_and_2_every_row_is_what_the_engine_saw(job: Job) -> None:
    reader = StoreReader(job.folder / "store")
    sessions = reader.read_sessions(state=SessionState.CLOSED)
    assert sessions
    several_turns = 0
    for session in sessions:
        trajectory = reader.read_trajectory(session.record.rollout_id, session.record.attempt)
        (row,) = trajectory_rows(trajectory)
        whole = np.concatenate([np.concatenate([t.prompt_delta, t.completion_ids]) for t in trajectory.turns])
        assert row.token_ids.tolist() == whole.tolist()
        several_turns += len(trajectory.turns) > 1
        sampled = np.concatenate([t.completion_ids for t in trajectory.turns])
        assert row.token_ids[row.loss_mask == 1].tolist() == sampled.tolist()
        assert set(row.sources[row.loss_mask == 1].tolist()) == {int(TokenSource.SAMPLED)}
        assert np.isnan(row.logprobs[row.loss_mask == 0]).all()
    assert several_turns


def test_law_5_advantages_count_each_rollout_once(job: Job) -> None:
    for step in (1, 2):
        by_group: dict[str, dict[str, float]] = {}
        for record in read_step(job.folder, step):
            group = record.rollout_id.rsplit("-", 1)[0]
            by_group.setdefault(group, {})[record.rollout_id] = record.advantage.value
        assert by_group
        for advantages in by_group.values():
            assert abs(sum(advantages.values())) < 1e-4


def test_inspect_shows_run_group_and_every_token(job: Job) -> None:
    status, out, _ = palestra("inspect", job.folder)
    assert status == 0
    assert "g000000" in out
    assert "the ledger balances" in out
    status, out, _ = palestra("inspect", job.folder, "g000000")
    assert status == 0
    assert "g000000-3" in out
    status, out, _ = palestra("inspect", job.folder, "g000000-0", "--json")
    entries = [json.loads(line) for line in out.splitlines()]
    reader = StoreReader(job.folder / "store")
    (row,) = trajectory_rows(reader.read_trajectory("g000000-0"))
    assert [e["id"] for e in entries] == row.token_ids.tolist()
    assert [e["mask"] for e in entries] == row.loss_mask.tolist()
    assert {e["version"] for e in entries if e["source"] == "sampled"} == {1}
    status, out, _ = palestra("inspect", job.folder, "g000000-0")
    assert status == 0
    assert "<|im_start|>" in out
    status, _, err = palestra("inspect", job.folder, "nothing")
    assert status == 1
    assert "nothing" in err


def test_a_second_run_in_the_same_folder_is_refused(job: Job) -> None:
    status, _, err = job.train()
    assert status == 2
    assert "--resume" in err
    status, _, err = job.train("--resume", "--optim.lr=1.0")
    assert status == 2
    assert "cannot change optim.lr" in err


def test_a_finished_run_can_be_made_longer(job: Job, tmp_path: Path) -> None:
    status, out, err = job.train("--resume", "--run.steps=3")
    assert status == 0, out + err
    check_laws(job, steps=3)
    versions = [entry["policy_version"] for entry in job.steps()]
    assert versions == sorted(set(versions)), "versions are never used twice"


def test_the_ledger_balances_with_tool_grader_and_engine_faults(warm_model: Path, tmp_path: Path) -> None:
    """One failing tool, truncated episodes (one call is allowed), a broken grader, and an engine that dies in the middle."""
    (tmp_path / "walk_faulty.py").write_text(FAULTY)
    env = {"PYTHONPATH": str(tmp_path)}
    config = tiny_config(
        warm_model.parent.parent.parent.parent,
        model={"path": str(warm_model)},
        env={"id": "walk_faulty:walk/Faulty-v0", "order": "sequential"},
        run={"save_dir": str(tmp_path), "name": "faulty", "steps": 3},
        algo={"groups_per_step": 3, "max_turns": 1},
        sft={"steps": 1, "batch_size": 1, "lr": 1e-6},
    )
    job = Job(config)
    process = job.start(env=env)
    try:
        job_started = job.folder / "metrics.jsonl"
        wait_for(lambda: job_started.exists() and job.steps(), "the first step", 120)
        job.kill("engine")
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, out + err
    assert "engine was ended by signal 9" in err
    status, out, err = job.train("--resume", env=env)
    assert status == 0, out + err
    ledger = job.ledger()
    assert ledger.balanced, ledger.lines()
    reader = StoreReader(job.folder / "store")
    outcomes = [s.outcome for s in reader.read_sessions() if s.outcome is not None]
    broken = [o for o in outcomes if "the grader broke" in json.dumps(o.episode)]
    assert broken
    assert all(o.reward is None for o in broken)
    assert any(o.truncated for o in outcomes)
    assert any((o.episode or {})["tool_errors"] for o in outcomes)
    assert not any(o.reward is not None and o.stop_reason == "infra" for o in outcomes)
    assert ledger.discarded["unscored"] > 0
