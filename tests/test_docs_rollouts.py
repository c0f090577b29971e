"""docs/rollouts.md is true: every block of code in it is run."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.plans.driver import PlanDriver
from palestra.agents.plans.history import History
from palestra.agents.plans.plan import RolloutPlan
from palestra.agents.types import GroupAssignment, PlayedRollout, ReviewRequest
from palestra.cli.config import check_config
from palestra.envs.tasksources import source_of
from palestra.envs.types import Message, Task
from tests.fakes.plan_service import FakePlanService
from tests.fakes.sessions import listening
from tests.plans import TASKS
from tests.test_plans_function import calls

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rollouts.md"
BLOCKS = [
    (found["how"] or found["language"], found["text"])
    for found in re.finditer(
        r"(?:<!-- (?P<how>\w+) -->\n)?```(?P<language>[a-z]+)\n(?P<text>.*?)^```$", PAGE.read_text(), re.S | re.M
    )
]


def of(kind: str) -> list[str]:
    return [text for how, text in BLOCKS if how == kind]


def defined_by(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"dataset": [{"question": "q", "answer": 1}]}
    exec(compile(text, str(PAGE), "exec"), names)
    return names


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {how for how, _ in BLOCKS} == {"toml", "plan", "tasks", "function"}


@pytest.mark.parametrize("text", of("toml"))
def test_configurations(text: str) -> None:
    given = {"model": {"path": "m"}, "env": {"id": "palestra/Calculator-v0"}, **tomllib.loads(text)}
    rollout = check_config(given, "x").rollout
    entry = rollout.plan or rollout.function
    assert entry is not None
    assert (PAGE.parent.parent / entry.split(":")[0]).is_file()


@pytest.mark.parametrize("text", of("plan"))
def test_plans(text: str) -> None:
    (kind,) = [
        value
        for value in defined_by(text).values()
        if isinstance(value, type) and issubclass(value, RolloutPlan) and value is not RolloutPlan
    ]
    plan = kind()
    plan.history = History()
    driver = PlanDriver(plan, lambda: TASKS)
    assert driver.registration().tasks == len(TASKS)
    assignment = GroupAssignment("g", 3, 0, 1, 0)
    assert driver.refusal(assignment) is None
    played: list[int] = []
    driver.run(assignment, lambda part: played.extend(part.rollouts) or [])
    assert played == [0, 1, 2]
    rollouts = tuple(PlayedRollout(i, f"g-{i}", 0, float(i), {}, "answer", False, 100, 1) for i in range(3))
    verdict, _ = driver.review(ReviewRequest("g", 1, rollouts))
    assert verdict.keep
    assert all(reward is not None for reward in verdict.rewards.values())


@pytest.mark.parametrize("text", of("tasks"))
def test_task_sources(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    Path("gsm.jsonl").write_text(json.dumps({"question": "q", "answer": 1}) + "\n")
    parquet.write_table(pyarrow.table({"prompt": ["q"], "answer": [1], "level": [2]}), "questions.parquet")
    lines = text.split("\n")
    ends = [at for at, line in enumerate(lines) if line.startswith("tasks =")] or [len(lines)]
    for end in ends:  # each line that names a source in its turn
        source = source_of(defined_by("\n".join(lines[: end + 1]))["tasks"])
        assert isinstance(source[0], Task)
        assert source[0].answer is not None


def script(key: str, messages: Sequence[Message]) -> Message:
    """Replies of different lengths, so that scores differ."""
    return {"role": "assistant", "content": "0" if key.endswith("0") else "long " * 5}


@pytest.mark.parametrize("text", of("function"))
def test_functions(text: str) -> None:
    function = defined_by(text)["generate_rollout"]
    with listening(FakePlanService(script=script, places=3)) as service:
        assert isinstance(service, FakePlanService)
        calls(function, service)
    assert sum(verdict.keep for verdict in service.verdicts.values()) >= 2
    assert all(episode.reward.value is not None for episode in service.episodes.values())
    assert threading.active_count() < 100


def test_the_readme_s_plan() -> None:
    """It keeps what the policy solves now and then."""
    text = (PAGE.parent.parent / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)^```$", text, re.S | re.M) if "RolloutPlan" in block)
    plan = defined_by(block)["Unsolved"]()

    def review(*rewards: float) -> bool:
        played = tuple(PlayedRollout(i, f"g-{i}", 0, r, {}, "answer", False, 1, 1) for i, r in enumerate(rewards))
        return bool(plan.review(ReviewRequest("g", 0, played)).keep)

    assert (review(1.0, 0.0), review(1.0, 1.0)) == (True, False)
