"""Training with agents that play by themselves, on real parts: their turns are recorded, scored and trained, and the ledger balances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.server.store.reader import StoreReader
from palestra.server.store.types import SessionState, StoredSession
from palestra.server.types import Trajectory
from tests.jobs import Job, check_laws
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.walk, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where model and demonstrations are made once."""
    return tmp_path_factory.mktemp("walk-agents")


@pytest.fixture(scope="module")
def warm_model(base: Path) -> Path:
    """Weights that make tool calls: those of a run of the message loop, the first kind of agent."""
    # At this rate the weights stay those of the warm start.
    tables = {"sft": {"steps": 120, "batch_size": 16}, "optim": {"lr": 1e-6}}
    job = train(base, "chat", {"kind": "chat", "request_timeout_s": 60.0}, **tables)
    assert all(episode["tools"] for _, _, episode in played(job))
    (folder,) = (job.folder / "weights").glob("v*")
    return folder


def train(base: Path, name: str, agent: dict[str, Any], **tables: dict[str, Any]) -> Job:
    """A finished run of one step."""
    job = Job(tiny_config(base, agent=agent, run={"name": name, "steps": 1}, **tables))
    status, out, err = job.train(env={"PYTHONPATH": f"{EXAMPLES}/command_agent:{EXAMPLES}/langgraph_agent"})
    assert status == 0, out + err
    check_laws(job, steps=1)
    return job


def train_warm(warm_model: Path, name: str, agent: dict[str, Any], **tables: dict[str, Any]) -> Job:
    """The same from warm weights."""
    base = warm_model.parent.parent.parent.parent
    cold = {"steps": 1, "batch_size": 1, "lr": 1e-6}
    return train(base, name, agent, model={"path": str(warm_model)}, sft=cold, **tables)


def played(job: Job) -> list[tuple[StoredSession, Trajectory, dict[str, Any]]]:
    """Every closed session with its turns and its episode."""
    reader = StoreReader(job.folder / "store")
    found = []
    for session in reader.read_sessions(state=SessionState.CLOSED):
        assert session.outcome is not None
        trajectory = reader.read_trajectory(session.record.rollout_id, session.record.attempt)
        found.append((session, trajectory, dict(session.outcome.episode or {})))
    assert len(found) >= 8
    return found


GRAPH = """
from agent import CONFIG, build, calculator

# The tiny model knows this one tool only.
GRAPH = build(streaming={streaming}, tools=[calculator])


def run(messages):
    return str(GRAPH.invoke({{"messages": messages}}, CONFIG)["messages"][-1].text)
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_a_langgraph_agent(warm_model: Path, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.format(streaming=streaming))
    agent = {"kind": "python", "entry": f"{tmp_path}/graph.py:run"}
    job = train_warm(warm_model, f"graph-{streaming}", agent, rollout={"context_len": 1024}, algo={"group_size": 8})
    whole, reader = 0, StoreReader(job.folder / "store")
    for session, trajectory, episode in played(job):
        assert episode["stop_reason"] != "infra", episode["error"]
        # A client may mend a call's broken arguments before it sends them back: that alone begins a branch, and is on record.
        roots = sum(turn.parent is None for turn in trajectory.turns)
        assert roots - 1 == sum(event.kind == "fork" for event in reader.read_events(session.record.rollout_id))
        whole += len(trajectory.turns) > 1 and roots == 1
        assert episode["turns"] == len([turn for turn in trajectory.turns if turn.delivered])
    assert whole, "no rollout got as far as a tool's result on one branch"


def test_a_loop_over_the_openai_client_with_a_score_of_its_own(warm_model: Path) -> None:
    job = train_warm(warm_model, "openai", {"kind": "python", "entry": f"{EXAMPLES}/openai_agent/agent.py:run"})
    rewards = [session.outcome.reward for session, _, _ in played(job) if session.outcome is not None]
    assert any(rewards)
    assert None not in rewards


def test_a_command(warm_model: Path) -> None:
    agent = {
        "kind": "command",
        "command": [f"{EXAMPLES}/command_agent/solve.py", "{task_file}"],
        "keep_workspace": True,
    }
    env = {"id": "answer_file:examples/AnswerFile-v0"}
    job = train_warm(warm_model, "command", agent, env=env)
    for _, trajectory, episode in played(job):
        assert "exit_status" in episode["reward"]["note"]
        assert trajectory.turns
    answers = list((job.folder / "workspaces").glob("*/answer.txt"))
    assert answers
    assert json.loads((answers[0].parent / ".palestra" / "task.json").read_text())["tools"]
