"""Runs that only play, runs that only train, and a batch that is trained again: the same bits wherever nothing but the mode differs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from palestra.cli.train import main as train
from palestra.server.types import TokenSource, TrainingSample, TrajectoryGroup, VersionSpan
from palestra.trainer.checkpoints import model_fingerprint
from palestra.trainer.dumps import Batch, DumpError, Origin, batch_files, batch_path, read_batch, write_batch
from palestra.trainer.loop import Trainer
from palestra.trainer.offline import DumpSource, DumpWriter, NoEngines, play_only
from palestra.trainer.records import read_step
from palestra.trainer.replay import TIMED, differences, replay
from palestra.trainer.settings import TrainerSettings, make_backend
from palestra.trainer.types import RolloutService
from tests.jobs import Job, palestra
from tests.test_trainer_loop import FakeService, settings_for
from tests.tiny import make_tiny_llama
from tests.tinyrun import tiny_config

pytestmark = [pytest.mark.walk, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def played(settings: TrainerSettings, service: FakeService, folder: Path, *, trains: bool = True) -> None:
    """A run of the name `run` below `folder` that keeps its batches."""
    keep = DumpWriter(folder / "dump", "run", model_fingerprint(settings.model), "hash", trains=trains)
    more: dict[str, Any] = {} if trains else {"train": play_only}
    Trainer(settings, make_backend(settings), service, folder / "run", lambda: False, keep=keep, **more).run()


def trained_again(settings: TrainerSettings, dump: Path, folder: Path) -> int:
    """A run on the batches of `dump` alone; the steps that it made."""
    source = DumpSource(dump, model_fingerprint(settings.model), FakeService().render)
    service = cast(RolloutService, source)
    backend = make_backend(settings)
    return Trainer(settings, backend, service, folder, lambda: False, publisher=NoEngines()).run()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compared(folder: Path) -> list[dict[str, Any]]:
    """What training itself says of each step: all but times and what only a service knows."""
    areas = ("train/", "mismatch/", "staleness/", "reward/", "trained_version")
    timed = (*TIMED, "train/trained_tokens_per_s/mean")
    return [{k: v for k, v in line.items() if k.startswith(areas) and k not in timed} for line in lines(folder)]


def checkpoint_bytes(folder: Path, step: int) -> dict[str, bytes]:
    state = folder / "checkpoints" / f"step_{step}" / "state"
    return {path.name: path.read_bytes() for path in state.iterdir()}


def test_training_a_dump_is_training_the_run_again_and_a_replay_finds_no_difference(
    model: Path, tmp_path: Path
) -> None:
    settings = settings_for(model, steps=4, save_every=2, algo={"updates_per_batch": 2, "kl_coef": 0.1})
    played(settings, FakeService(model), tmp_path)
    run, dump = tmp_path / "run", tmp_path / "dump"
    assert [read_batch(path).origin.optimizer_steps for path in batch_files(dump)] == [0, 2, 4, 6]
    assert all(line["train/grad_norm"] > 0 for line in compared(run))

    assert trained_again(settings, dump, tmp_path / "again") == 4
    assert compared(tmp_path / "again") == compared(run)
    assert checkpoint_bytes(tmp_path / "again", 4) == checkpoint_bytes(run, 4)

    # From the checkpoint of step 2 over the batch of step 3.
    done = replay(settings, make_backend(settings), run, "run", batch_path(dump, 4))
    assert done.checkpoint == "step_2"
    recorded = lines(run)[3]
    assert differences(done.result, recorded, read_step(run, 4)) == []
    assert done.result.metrics["train/loss"] == recorded["train/loss"]
    changed = settings_for(model, steps=4, algo={"updates_per_batch": 2, "kl_coef": 0.2})
    other = replay(changed, make_backend(changed), run, "run", batch_path(dump, 4))
    assert any(said.startswith("train/loss:") for said in differences(other.result, recorded, read_step(run, 4)))

    with pytest.raises(DumpError, match="a batch of run 'run', this is 'other'"):
        replay(settings, make_backend(settings), run, "other", batch_path(dump, 4))
    batch_path(dump, 3).rename(tmp_path / "elsewhere")
    with pytest.raises(DumpError, match="no checkpoint leads to step 4"):
        replay(settings, make_backend(settings), run, "run", batch_path(dump, 4))


def test_a_batch_of_another_lineage_is_no_replay(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, steps=2, save_every=1)
    played(settings, FakeService(model), tmp_path)
    batch = read_batch(batch_path(tmp_path / "dump", 2))
    origin = Origin("run", 2, 5, 5, batch.origin.fingerprint, "hash", True)
    write_batch(tmp_path / "dump", Batch(origin, batch.groups))
    with pytest.raises(DumpError, match="after 5 optimizer steps, but these checkpoints and batches lead to 1"):
        replay(settings, make_backend(settings), tmp_path / "run", "run", batch_path(tmp_path / "dump", 2))


def test_a_run_that_trains_a_dump_goes_on_where_it_stopped(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, steps=3, save_every=1)
    played(settings, FakeService(model), tmp_path)
    assert trained_again(settings_for(model, steps=1, save_every=1), tmp_path / "dump", tmp_path / "again") == 1
    assert trained_again(settings_for(model, steps=9, save_every=1), tmp_path / "dump", tmp_path / "again") == 3
    assert compared(tmp_path / "again") == compared(tmp_path / "run")


def test_playing_alone_moves_no_weight_and_its_tokens_age_when_they_are_trained(model: Path, tmp_path: Path) -> None:
    settings = settings_for(model, steps=3, save_every=3, algo={"updates_per_batch": 2})
    service = FakeService(model)
    played(settings, service, tmp_path, trains=False)
    assert [version for version, _ in service.published] == [0, 1, 2, 3]
    assert {state for state, _ in service.state.values()} == {"committed"}
    assert [line["train/groups"] for line in lines(tmp_path / "run")] == [2, 2, 2]
    assert not any("train/loss" in line for line in lines(tmp_path / "run"))
    batches = [read_batch(path) for path in batch_files(tmp_path / "dump")]
    assert [each.origin.trained for each in batches] == [False] * 3
    assert {
        version for each in batches for group in each.groups for version in (group.min_version, group.max_version)
    } == {0}
    with pytest.raises(DumpError, match="only played this batch"):
        replay(settings, make_backend(settings), tmp_path / "run", "run", batch_path(tmp_path / "dump", 3))
    assert trained_again(settings, tmp_path / "dump", tmp_path / "again") == 3
    assert [line["staleness/max"] for line in compared(tmp_path / "again")] == [0, 2, 4]


def handmade(step: int, fingerprint: str) -> Batch:
    """Two groups of random tokens whose rewards differ, as the run `tiny` would have dumped them."""
    draw = np.random.default_rng(step)

    def row(group: str, index: int) -> TrainingSample:
        ids, mask = draw.integers(9, 400, 24).astype(np.int32), np.array([0] * 16 + [1] * 8, dtype=np.uint8)
        return TrainingSample(
            rollout_id=f"{group}-{index}",
            attempt=0,
            group_id=group,
            task_id=group,
            branch=0,
            token_ids=ids,
            loss_mask=mask,
            sources=np.where(mask == 1, TokenSource.SAMPLED, TokenSource.PROMPT).astype(np.uint8),
            logprobs=np.where(mask == 1, np.float32(-6), np.float32(np.nan)).astype(np.float32),
            spans=(VersionSpan(step - 1, 16, 24),),
            temperature=1.0,
            reward=float(index % 2),
            turn_rewards=(),
            stop_reason="terminated",
        )

    groups = []
    for name in (f"a{step}", f"b{step}"):
        rows = tuple(row(name, i) for i in range(4))
        groups.append(TrajectoryGroup(name, name, 4, rows, {each.rollout_id: each.reward or 0.0 for each in rows}))
    return Batch(Origin("tiny", step, step - 1, step - 1, fingerprint, "hash", True), tuple(groups))


def test_the_command_trains_a_dump_and_replays_its_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a trainer runs: no engine, no service, no worker."""
    config = tiny_config(tmp_path, run={"keep_checkpoints": 3}, train={"threads": 1})
    config = config.model_copy(update={"sft": None})
    job, dump = Job(config), tmp_path / "dump"
    fingerprint = model_fingerprint(tmp_path / "model")
    for step in (1, 2):
        write_batch(dump, handmade(step, fingerprint))
    status, out, err = job.train("--train-only", str(dump), "--run.steps=4")
    assert status == 0, out + err
    assert f"warning run.steps: {dump} has batches for 2 of 4 steps" in out
    assert {path.stem for path in (job.folder / "roles").glob("*.json")} == {"trainer"}
    assert all(entry["train/grad_norm"] > 0 for entry in job.steps())

    toml = job.folder / "run.toml"
    status, out, err = palestra("train", toml, "--replay", dump)
    assert status == 0, out + err
    assert "step 2 of run tiny, again from step_1" in out
    assert "the same bit for bit: all figures and the logprobs of 8 rows" in out

    metrics = job.folder / "metrics.jsonl"
    *first, last = metrics.read_text().splitlines()
    entry = json.loads(last)
    metrics.write_text("\n".join([*first, json.dumps({**entry, "train/loss": entry["train/loss"] + 1e-9})]) + "\n")
    # In this process, which has loaded torch already.
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    threads = torch.get_num_threads()
    try:
        assert train([str(toml), "--replay", str(dump)]) == 1
        assert "differs: train/loss:" in capsys.readouterr().out
        metrics.write_text("\n".join(first) + "\n")
        assert train([str(toml), "--replay", str(dump)]) == 1
        assert "not compared: the run has no record of step 2" in capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)


def test_the_command_plays_alone(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, run={"steps": 2})
    job, dump = Job(config.model_copy(update={"sft": None})), tmp_path / "dump"
    status, out, err = job.train("--rollout-only", str(dump))
    assert status == 0, out + err
    assert job.ledger().balanced
    assert [read_batch(path).origin.step for path in batch_files(dump)] == [1, 2]
    claimed = {group.group_id: n for n in (1, 2) for group in read_batch(batch_path(dump, n)).groups}
    assert claimed == job.committed()
    assert not any("train/loss" in entry for entry in job.steps())
    assert job.leftovers() == []
