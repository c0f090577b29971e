"""What the trainer leaves on the disk: checkpoints, published weights, step records, metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from palestra.trainer.checkpoints import Checkpoint, Checkpoints, Meta, model_fingerprint
from palestra.trainer.config import WeightsConfig
from palestra.trainer.megatron.backend import MegatronBackend
from palestra.trainer.megatron.weights import HfWeights
from palestra.trainer.publish import Publisher
from palestra.trainer.records import MetricsFile, read_step, row_record, write_step
from palestra.trainer.types import CheckpointError, RowAdvantage, TrainerError
from palestra.trainer.weights.disk import buckets
from tests.test_trainer_loop import FakeService
from tests.test_trainer_math import row
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def backend(model: Path) -> MegatronBackend:
    return MegatronBackend.from_folder(model)


def meta(step: int) -> Meta:
    return Meta(step, step, step, "f", "c", (f"g{step}",))


def test_only_whole_checkpoints_count_and_the_newest_are_kept(tmp_path: Path, backend: MegatronBackend) -> None:
    kept = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert kept.latest() is None
    for step in (2, 10, 9):
        kept.save(backend, meta(step))
    assert [each.id for each in kept.all()] == ["step_9", "step_10"]
    # what a kill leaves: an unfinished folder, one without meta, one with half a meta
    shutil.copytree(kept.root / "step_10", kept.root / ".tmp-step_12-1")
    (kept.root / "step_13").mkdir()
    shutil.copytree(kept.root / "step_10", kept.root / "step_14")
    (kept.root / "step_14" / "meta.json").write_text('{"train_step": 14, "poli')
    found = kept.latest()
    assert found == Checkpoint("step_10", kept.root / "step_10", meta(10))
    kept.save(backend, meta(11))
    assert not (kept.root / ".tmp-step_12-1").exists()
    assert [each.id for each in kept.all()] == ["step_10", "step_11"]


class _DiskFull:
    """A backend whose disk is full halfway."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")


def test_a_failed_save_leaves_the_old_checkpoints(tmp_path: Path, backend: MegatronBackend) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(backend, meta(1))
    with pytest.raises(CheckpointError, match="No space left"):
        kept.save(_DiskFull(), meta(2))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, backend: MegatronBackend, model: Path) -> None:
    kept = Checkpoints(tmp_path)
    saved = kept.save(backend, meta(1))
    with pytest.raises(CheckpointError, match="another model"):
        kept.load(backend, saved, model_fingerprint(model))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, backend: MegatronBackend) -> None:
    kept = Checkpoints(tmp_path)
    saved = kept.save(backend, meta(1))
    weights = saved.path / "state" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        kept.load(MegatronBackend(backend.arch, backend._settings), saved, "f")


def test_disk_publish_is_a_model_and_only_the_newest_stays(
    tmp_path: Path, backend: MegatronBackend, model: Path
) -> None:
    service = FakeService()
    settings = WeightsConfig(bucket_bytes=100_000)
    publisher = Publisher(service, settings, tmp_path, model)
    publisher.publish(backend, 3, 2)
    published = publisher.publish(backend, 4, 3)
    assert published.bytes == sum(tensor.nbytes for _, tensor in backend.export())
    assert service.canaries == [(3, 16), (4, 16)]
    folder = tmp_path / "weights" / "v4"
    assert service.published == [(3, str(folder.with_name("v3"))), (4, str(folder))]
    assert [path.name for path in folder.parent.iterdir()] == ["v4"]
    assert len(list(folder.glob("*.safetensors"))) > 2, "the limit must have split the weights"
    assert (folder / "tokenizer.json").is_file()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    weights = HfWeights(folder)
    assert all(torch.equal(tensor, weights(name)) for name, tensor in backend.export())
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(loaded["model.norm.weight"], weights("model.norm.weight"))


def test_buckets_keep_order_and_limit() -> None:
    tensors = [(name, torch.zeros(size)) for name, size in (("a", 10), ("b", 10), ("big", 100_000), ("c", 10))]
    assert [list(bucket) for bucket in buckets(tensors, 10_000)] == [["a", "b"], ["big"], ["c"]]


def test_weights_that_read_back_differently_are_not_published(
    tmp_path: Path, backend: MegatronBackend, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotten(tensors: dict[str, torch.Tensor], path: str, about: dict[str, str]) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, about)

    monkeypatch.setattr("palestra.trainer.weights.disk.save_file", rotten)
    service = FakeService()
    with pytest.raises(TrainerError, match="reads back differently"):
        Publisher(service, WeightsConfig(), tmp_path, model).publish(backend, 1, 1)
    assert service.published == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_step_records_come_back(tmp_path: Path) -> None:
    first, second = row("a", 2, 1.0, prompt=2), row("b", 3, 0.0, prompt=1, branch=1)
    advantages = [RowAdvantage("a", 0, 0.5, 0.5, 0.7), RowAdvantage("b", 1, -0.5, 0.5, 0.7)]
    padded = np.arange(10, dtype=np.float32)
    records = [row_record(s, a, padded, padded + 1) for s, a in zip((first, second), advantages, strict=True)]
    write_step(tmp_path, 7, records)
    back = read_step(tmp_path, 7)
    assert [(r.rollout_id, r.attempt, r.branch, r.group_id, r.advantage) for r in back] == [
        ("a", 0, 0, "g", advantages[0]),
        ("b", 0, 1, "g", advantages[1]),
    ]
    np.testing.assert_array_equal(back[0].policy_logprobs, [np.nan, np.nan, 2, 3])
    assert back[1].ref_logprobs is not None
    np.testing.assert_array_equal(back[1].ref_logprobs, [np.nan, 2, 3, 4])
    assert all(r.advantage.tokens is None for r in back)
    write_step(tmp_path, 8, [])
    assert read_step(tmp_path, 8) == []
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["7.json", "7.npz", "8.json", "8.npz"]


def test_advantages_of_single_tokens_come_back_beside_those_of_whole_rows(tmp_path: Path) -> None:
    turns = np.array([0, 0, 1, -1], dtype=np.float32)
    advantages = [RowAdvantage("a", 0, 0.0, 0.5, 0.7, turns), RowAdvantage("b", 1, -0.5, 0.5, 0.7)]
    samples = row("a", 2, 1.0, prompt=2), row("b", 3, 0.0, prompt=1, branch=1)
    zeros = np.zeros(10, dtype=np.float32)
    write_step(tmp_path, 7, [row_record(s, a, zeros, None) for s, a in zip(samples, advantages, strict=True)])
    first, second = read_step(tmp_path, 7)
    np.testing.assert_array_equal(first.advantage.tokens, turns)  # type: ignore[arg-type]
    np.testing.assert_array_equal(second.advantage.tokens, [-0.5] * 4)  # type: ignore[arg-type]


def test_metrics_survive_half_a_line(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.append({"train_step": 1, "train/loss": 0.5})
    with metrics.path.open("a") as handle:
        handle.write('{"train_step": 2, "tra')
    metrics.append({"train_step": 2, "train/grad_norm": float("nan"), "train/lr": np.float32(0.5)})
    lines = metrics.path.read_text().splitlines()
    assert len(lines) == 3
    last = json.loads(lines[-1])
    assert (last["train_step"], last["train/grad_norm"], last["train/lr"]) == (2, None, 0.5)
