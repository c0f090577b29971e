"""Training with programs of users, on real parts: the example's function that over-samples, and the example's plan with a curriculum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.server.buffer.reader import BufferReader
from palestra.server.types import GroupState
from tests.jobs import Job, check_laws
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.walk, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where model and demonstrations are made once."""
    return tmp_path_factory.mktemp("walk-plans")


def train(base: Path, name: str, **tables: dict[str, Any]) -> Job:
    """A finished run of two steps."""
    job = Job(tiny_config(base, **{"run": {"name": name}, **tables}))
    status, out, err = job.train()
    assert status == 0, out + err
    check_laws(job, steps=2)
    return job


def entries(job: Job) -> Iterator[Any]:
    reader = BufferReader(job.folder / "store")
    try:
        yield from reader.entries()
    finally:
        reader.close()


def test_a_function_that_over_samples_until_a_batch_has_something_to_learn_from(base: Path) -> None:
    function = f"{EXAMPLES}/rollout_function/rollout.py:generate_rollout"
    job = train(base, "function", rollout={"function": function, "context_len": 1024})
    for entry in entries(job):
        rewards = {rollout.reward for rollout in entry.rollouts if rollout.reward is not None}
        if entry.state is GroupState.COMMITTED:
            assert len(rewards) > 1, "every trained group has variance"
        else:
            assert str(entry.reason).startswith("filtered"), entry
    assert all(step["train/abs_dlogp/max"] < 1e-4 for step in job.steps())


@pytest.mark.full
def test_a_plan_with_a_curriculum(base: Path) -> None:
    (base / "plan.py").write_text(
        (EXAMPLES / "rollout_plan" / "plan.py")
        .read_text()
        .replace("if not any(reward > 0", "if not rewards or not all(-9 < reward")
    )
    plan = f"{base}/plan.py:Curriculum"
    env = {"args": {"prompt": "plain", "size": 8}}
    job = train(base, "plan", rollout={"plan": plan, "context_len": 512, "threads": 1}, env=env)
    remembered = [json.loads(line) for line in (job.folder / "history.jsonl").read_text().splitlines()]
    assert {line["group"] for line in remembered} >= set(job.committed())
    assert all(0 <= line["task"] < 8 for line in remembered)
