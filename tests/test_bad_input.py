"""Wrong input to `palestra train`: one clear message each, nothing started, nothing lost, and an exit status that scripts can use."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, check_laws, palestra
from tests.tinyrun import tiny_config

pytestmark = pytest.mark.walk


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad-input")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--optim.learning_rate=1", "unknown field optim.learning_rate"),
        ("--env.id=palestra/Calculater-v0", "did you mean 'palestra/Calculator-v0'?"),
        ("--env.id=no_such_module:x/Y-v0", "module 'no_such_module' cannot be imported"),
        ("--megatron.atention_dropout=0.1", "did you mean .*attention_dropout"),
        ("--megatron.num_layers=4", "num_layers"),
        ("--algo.max_response=512", "leaves no room for a prompt"),
        ("--sft.data=/nowhere/demos.jsonl", "sft.data: /nowhere/demos.jsonl is no file"),
        ("--model.path=/nowhere/model", "model.path: .*/nowhere/model"),
        ("nonsense", "unexpected 'nonsense'"),
    ],
)
def test_refused_before_anything_starts(base: Path, override: str, said: str) -> None:
    job = Job(tiny_config(base, run={"name": "refused"}))
    status, out, err = job.train(override)
    assert status == 2, out + err
    assert re.search(said, err), err
    assert "Traceback" not in err
    assert not (job.folder / "roles").exists()


def test_a_task_file_with_a_broken_line_is_named(base: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "What is 1 plus 1?", "answer": 2, "id": "a"}\n{"prompt": "What is 1 plus\n')
    job = Job(tiny_config(base, run={"name": "tasks"}, env={"tasks": str(tasks)}))
    status, _, err = job.train()
    assert status == 2
    assert f"{tasks}:2: column" in err


def test_missing_configuration_and_unknown_verbs(tmp_path: Path) -> None:
    status, _, err = palestra("train", tmp_path / "none.toml")
    assert (status, "cannot be read" in err) == (2, True)
    status, _, err = palestra("fly")
    assert status == 2
    assert "invalid choice" in err


def test_a_model_that_cannot_be_trained_is_refused_by_its_role(base: Path, tmp_path: Path) -> None:
    """The folder looks like a model, so the fault shows when a role loads it: its own message reaches the user."""
    good = Path(tiny_config(base).model.path)
    broken = tmp_path / "model"
    broken.mkdir()
    for path in good.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = (broken / "config.json").read_text().replace('"qwen3_moe"', '"mystery"')
    (broken / "config.json").write_text(config)
    job = Job(tiny_config(base, run={"name": "mystery"}, model={"path": str(broken)}))
    status, out, err = job.train()
    assert status != 0, out
    assert "mystery" in err
    assert job.leftovers() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.fail("this test mounts a file system: run it as root, as .ci/run does")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_a_full_disk_stops_the_run_and_loses_nothing(base: Path, small_disk: Path) -> None:
    tables: dict[str, Any] = {"run": {"save_dir": str(small_disk), "name": "full", "steps": 3, "save_every": 1}}
    job = Job(tiny_config(base, **tables).model_copy(update={"sft": None}))
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * (10 << 20))
    status, out, err = job.train()
    assert status == 1, out + err
    assert "No space left" in err or "full" in err, err
    assert job.leftovers() == []
    assert job.ledger(over=False).balanced
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=256m", str(small_disk)], check=True)
    status, out, err = job.train("--resume")
    assert status == 0, out + err
    check_laws(job, 3)
