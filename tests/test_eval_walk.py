"""Evaluations as processes of their own: killed at random points and gone on with, stopped by Ctrl-C; and two agents that score alike."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.evaluation.records import EPISODES, latest, read_header, read_rows
from palestra.agents.evaluation.stats import Interval
from palestra.cli.eval import main
from tests.evals import CALCULATOR
from tests.fakes.hash_model import HashModel, serving
from tests.live import wait_for

pytestmark = [pytest.mark.walk, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parent.parent
CODE = "import sys; from palestra.cli.eval import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def model() -> Iterator[HashModel]:
    with serving(HashModel(delay_s=0.02)) as model:
        yield model


def words(model: HashModel, out: Path, *more: str) -> list[str]:
    base = [CALCULATOR, "--model", "hash", "--base-url", model.url, "-n", "12", "-k", "3", "-c", "3", "--out", str(out)]
    return [*base, *more]


def started(argv: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, *argv]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def figures(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The table without what a clock or a place says."""
    capsys.readouterr()
    assert main(["show", str(out), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    for name in ("seconds_p50", "seconds_p95", "call_p50", "call_p95"):
        told["cost"].pop(name)
    told.pop("folder")
    return told


def rows_in(out: Path) -> int:
    return (out / EPISODES).read_bytes().count(b"\n") if (out / EPISODES).exists() else 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_killed_at_random_points_and_resumed_it_gives_the_same_table(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Before the first row, and in the middle; once a kill cuts a line in two."""
    rng, out = random.Random(seed), tmp_path / "killed"
    points = [0, rng.randint(2, 28)]
    for point in points:
        process = started(words(model, out, "--resume"))
        try:
            if point:
                wait_for(lambda wanted=point: rows_in(out) >= wanted, f"{point} rows", 60)
            else:
                wait_for((out / EPISODES).exists, "the file of rows", 60)
        finally:
            process.kill()
            process.communicate()
    before = (out / EPISODES).read_bytes()
    torn = before[: len(before) - rng.randint(1, 40)]
    (out / EPISODES).write_bytes(torn)
    kept, asked = rows_in(out), len(model.requests)
    assert points[-1] - 1 <= kept < 36
    assert main(words(model, out, "--resume")) == 0
    assert len(model.requests) - asked <= 2 * (36 - kept), "only what was owed was played"
    rows = read_rows(out)
    assert len(rows) == len({row.key for row in rows}) == 36
    assert (out / EPISODES).read_bytes().startswith(torn[: torn.rfind(b"\n") + 1])
    assert main(words(model, tmp_path / "whole")) == 0
    assert figures(out, capsys) == figures(tmp_path / "whole", capsys)


def test_the_first_interrupt_drains_and_the_second_leaves(model: HashModel, tmp_path: Path) -> None:
    model.delay_s = 0.15
    out = tmp_path / "drained"
    process = started(words(model, out, "--json"))
    try:
        wait_for(lambda: rows_in(out) >= 2, "two rows", 60)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    told = json.loads(said)
    assert 2 <= told["finished"] < 36
    assert (told["owed"], told["errors"]) == (36 - told["finished"], 0)
    assert "what is under way is played to its end" in errors
    assert f"{told['owed']} episodes are owed" in errors
    second = started(words(model, out, "--resume"))
    try:
        wait_for(lambda: rows_in(out) > told["finished"], "another row", 60)
        model.delay_s = 100.0
        second.send_signal(signal.SIGINT)
        assert second.stderr is not None
        wait_for(lambda: "played to its end" in str(second.stderr and second.stderr.readline()), "the first wish", 30)
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=60)
    finally:
        second.kill()
        second.wait()
    assert second.returncode == 130
    assert all(row.scored for row in latest(read_rows(out)).values())


def test_a_langgraph_agent_and_the_chat_policy_score_within_noise(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example as it is, with tools of its own, against the message loop with ours: other seeds of the model, the same tasks."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    model.delay_s = 0.0
    base = [CALCULATOR, "--model", "hash", "--base-url", model.url, "-n", "40", "-k", "2", "--order", "sequential"]
    agent = ("--agent", str(ROOT / "examples" / "langgraph_agent" / "agent.py") + ":run")
    assert main([*base, "--out", str(tmp_path / "chat")]) == 0
    assert main([*base, "--out", str(tmp_path / "graph"), "--seed", "1", *agent]) == 0
    assert read_header(tmp_path / "graph").spec.agent["kind"] == "python"
    assert all(row.usage.calls == row.turns for row in read_rows(tmp_path / "graph"))
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "chat"), str(tmp_path / "graph"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    line = told["lines"][0]
    assert 0.2 < line["first"]["mean"] < 0.9, "the task is neither trivial nor hopeless"
    assert Interval(**line["difference"]["interval"]).holds(0.0), line
    assert told["tasks"] == 40
