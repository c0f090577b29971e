"""Evaluations of whole jobs: on the training's engines with publishes held, beside it on an engine of their own, on engines by URL."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from palestra.agents.evaluation.records import read_header, read_rows
from palestra.cli.config import check_config
from palestra.cli.eval import main as palestra_eval
from palestra.cli.evaluation.own_service import OwnService, own_service
from palestra.server.buffer.reader import BufferReader
from palestra.server.eval_client import EvalClient
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.types import Due
from palestra.server.ledger import is_evaluation, read_ledger
from palestra.server.store.reader import StoreReader
from tests.fakes.tiny_engine import tiny_engine
from tests.fakes.tiny_model import make_tiny_numpy
from tests.jobs import Job, check_laws
from tests.live import wait_for
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.walk, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is; every job has a folder of its own beside it."""
    return tmp_path_factory.mktemp("evals")


def job_of(base: Path, name: str, **section: Any) -> Job:
    wanted = {"n": 3, "k": 2, "max_turns": 2, "concurrency": 6, "deadline_s": 120.0, **section}
    config = tiny_config(
        base,
        run={"name": name},
        schedule={"kind": "async", "max_staleness": 1},
        eval=wanted,
    )
    return Job(config.model_copy(update={"sft": None}))


def sampled_by(store: Path) -> dict[int, set[int]]:
    """Version that an evaluation was of -> versions that sampled its sessions' tokens."""
    reader, found = StoreReader(store), dict[int, set[int]]()
    for session in reader.read_sessions():
        if is_evaluation(session.record):
            turns = reader.read_trajectory(session.record.rollout_id, session.record.attempt).turns
            about = session.record.meta["meta"]
            found.setdefault(about["version"], set()).update(span.version for turn in turns for span in turn.spans)
    reader.close()
    return found


def shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert palestra_eval(["show", str(folder), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_on_the_training_s_engines_with_publishes_held(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(base, "hold", on="hold", every=1)
    status, out, err = job.train()
    assert status == 0, out + err
    check_laws(job, steps=2)
    lines = EvalDesk(job.folder).outcomes()
    assert [(line["eval/train_step"], line["state"]) for line in lines] == [(0, "done"), (1, "done"), (2, "done")]
    versions = [line["eval/version"] for line in lines]
    assert versions == sorted(set(versions))
    assert sampled_by(job.folder / "store") == {version: {version} for version in versions}
    reader = BufferReader(job.folder / "store")
    trained = {counts.rollout_id for entry in reader.entries() for counts in entry.rollouts}
    reader.close()
    assert trained
    assert not [rollout for rollout in trained if rollout.startswith("eval-")]
    ledger = job.ledger()
    assert ledger.discarded["evaluation"] == sum(line["eval/Calculator-v0/tokens"] for line in lines) > 0
    assert all(entry["time/eval_hold_s"] >= 0 for entry in job.steps())
    assert sum(entry["time/eval_hold_s"] for entry in job.steps()) > 0
    told = shows(job.folder / "evals" / "step_1", capsys)
    assert (told["scored"], told["errors"], told["owed"]) == (6, 0, 0)
    assert "eval step 1" in out


def test_beside_the_training_killed_in_the_middle_and_resumed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kill -9 of the supervisor ends the evaluation's own engine and service with all else; what is owed is played of the same version."""
    job = job_of(base, "job", on="job", every=2, at_start=False, n=8, concurrency=1)
    folder = job.folder / "evals" / "step_2"
    process = job.start()
    try:
        wait_for(lambda: len(read_rows(folder)) >= 2 or process.poll() is not None, "two episodes", 240)
        assert process.poll() is None, process.communicate()
        assert len(left(job)) >= 3, "the evaluator, its engine and its service"
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not left(job), "the end of all that the supervisor had started", 30)
    before = len(read_rows(folder))
    status, out, err = job.train("--resume")
    assert status == 0, out + err
    check_laws(job, steps=2)
    (line,) = EvalDesk(job.folder).outcomes()
    assert (line["state"], line["eval/train_step"]) == ("done", 2), line
    version = line["eval/version"]
    assert read_header(folder).provenance["training"]["version"] == version
    stores = sorted(folder.glob("service-*/store"))
    assert len(stores) == 2
    for store in stores:
        assert sampled_by(store) == {version: {version}}
        ledger = read_ledger(store)
        assert ledger.balanced
        assert ledger.discarded.keys() <= {"evaluation", "undelivered"}
    assert sampled_by(job.folder / "store") == {}
    assert not (folder / "weights").exists()
    assert shows(folder, capsys)["finished"] == len(read_rows(folder)) == 16 > before
    assert left(job) == []


def left(job: Job) -> list[int]:
    """Pids of the job or of its evaluations' services that are still there."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if f"{job.folder}/".encode() in command and b"palestra.cli.main\0role" in command:
            pids.append(int(path.parent.name))
    return pids


def test_on_engines_by_url_that_load_the_weights_and_name_the_version(tmp_path: Path) -> None:
    """A fake of SGLang's surface that really loads: only the service is a process of its own."""
    one, other = make_tiny_numpy(tmp_path / "one", 1), make_tiny_numpy(tmp_path / "other", 2)
    tables: dict[str, Any] = {"model": {"path": str(one)}, "env": {"id": "palestra/Calculator-v0"}}
    folder = tmp_path / "evals" / "step_4"
    seen: list[Any] = []
    with tiny_engine(one) as engine:
        config = check_config({**tables, "eval": {"on": "engines", "urls": [engine.url]}}, "run.toml")
        assert config.eval is not None

        def work(own: OwnService, client: EvalClient) -> None:
            handle = client.open_evaluation("r", "g", "t", {"max_turns": 1, "max_response": 8}, {})
            chat = {"messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx.post(
                f"{handle.base_url}/chat/completions",
                json=chat,
                headers={"Authorization": f"Bearer {handle.api_key}"},
                timeout=30,
            )
            assert answer.status_code == 200, answer.text
            seen.append((client.versions_of(handle), own.fault()))

        due = Due(4, 11, "engines", time.time())
        own_service(config, config.eval, due, folder, other, threading.Event(), work)
        assert seen == [(frozenset({11}), None)]
        assert engine.core.version == "11"
