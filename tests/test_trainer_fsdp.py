"""FsdpBackend: the backends' conformance suite, two ranks beside one, megatron and plain torch, checkpoints that both backends read, and a
whole run with it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.trainer.config import OptimConfig
from palestra.trainer.fsdp.backend import FsdpBackend, FsdpSettings
from palestra.trainer.losses import nll_loss
from palestra.trainer.settings import TrainConfig, TrainerSettings, make_backend
from palestra.trainer.types import Backend, CheckpointError, MicroBatch, TrainerError
from tests.conformance.backend_suite import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    LR,
    BackendSuite,
    MakeBackend,
    batches_of,
    exported,
    folder,
    hf_model,
    micro_batch,
    sample_rows,
    torch_step,
)
from tests.jobs import Job, check_laws
from tests.tiny import make_tiny_llama, make_tiny_moe
from tests.tinyrun import tiny_config

__all__ = ["folder"]

pytestmark = pytest.mark.timeout(300)
RANKS, DEADLINE_S = 2, 240.0


def fsdp(folder: Path, *, chunk: int = 0) -> FsdpBackend:
    optim = OptimConfig(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP)
    return FsdpBackend.from_folder(folder, FsdpSettings(optim=optim, logprob_chunk=chunk))


def megatron(folder: Path) -> Backend:
    from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
    from palestra.trainer.megatron.optimizer import OptimSettings

    optim = OptimSettings(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP)
    return MegatronBackend.from_folder(folder, BackendSettings(optim=optim))


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference between tensors of the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.walk
class TestFsdpBackend(BackendSuite):
    @pytest.fixture
    def make(self) -> MakeBackend:
        return fsdp


def uneven(step: int) -> list[MicroBatch]:
    """Three micro-batches, so that one of two ranks has none in the second turn."""
    rows, starts = sample_rows(step + 20)
    return [*batches_of(step), micro_batch(rows[3:5], starts[3:5], 0.03, 1.3)]


def steps_of(backend: Backend, steps: range) -> list[tuple[float, float, int, float]]:
    """Loss, gradient norm, tokens and trained tokens of each."""
    out = []
    for step in steps:
        stats = backend.forward_backward(uneven(step), nll_loss)
        out.append((stats.loss, backend.optim_step(LR).grad_norm, stats.tokens, stats.sums["tokens"]))
    return out


def one_rank(rank: int, folders: list[str], root: str) -> None:
    """Three steps, a checkpoint, and a fourth step of a backend that read it; leaves figures of every rank and weights of the first."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=RANKS)
    for each in map(Path, folders):
        out = Path(root) / each.name
        backend = fsdp(each, chunk=5)
        backend.freeze_reference()
        before = backend.logprobs(uneven(0))
        figures = steps_of(backend, range(3))
        third = exported(backend)
        kept = backend.logprobs(uneven(0), reference=True)
        backend.save(out / "state")
        later = fsdp(each)
        later.load(out / "state")
        figures += steps_of(later, range(3, 4))
        again = later.logprobs(uneven(0), reference=True)
        fourth = exported(later)
        same = all(
            np.allclose(a, b, rtol=0, atol=1e-5) and np.allclose(a, c, rtol=0, atol=1e-5)
            for a, b, c in zip(before, kept, again, strict=True)
        )
        told = {"figures": figures, "reference": same, "logprobs": [values.tolist() for values in before]}
        (out / f"rank{rank}.json").write_text(json.dumps(told))
        if rank == 0:
            save_file(third, str(out / "third.safetensors"))
            save_file(fourth, str(out / "fourth.safetensors"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of models, and one with a folder for each of them with what two ranks left."""
    root, models = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("models")
    # 255 lines of a matrix cannot be halved.
    folders = [make_tiny_moe(models / "moe"), make_tiny_llama(models / "tied", intermediate_size=255)]
    folders.append(make_tiny_llama(models / "untied", tie_word_embeddings=False))
    for each in folders:
        (root / each.name).mkdir()
    started = torch.multiprocessing.start_processes(
        one_rank, args=([str(each) for each in folders], str(root)), nprocs=RANKS, join=False, start_method="spawn"
    )
    until = time.monotonic() + DEADLINE_S
    try:
        while not started.join(timeout=1.0):  # raises what a rank raised, and ends the others
            assert time.monotonic() < until, f"two ranks are not done after {DEADLINE_S:.0f} s"
    finally:
        for process in started.processes:
            process.kill()
    return models, root


@pytest.mark.ci
@pytest.mark.parametrize("name", ["moe", "tied", "untied"])
def test_two_ranks_are_one_and_megatron_and_torch(two_ranks: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    model, found = (each / name for each in two_ranks)
    first, second = (json.loads((found / f"rank{rank}.json").read_text()) for rank in range(RANKS))
    assert first == second, "every rank is told the same"
    assert first["reference"]
    alone = fsdp(model)
    for ours, theirs in zip(alone.logprobs(uneven(0)), first["logprobs"], strict=True):
        np.testing.assert_allclose(ours, np.array(theirs), atol=1e-5)
    plain, other = hf_model(model), megatron(model)
    plain.get_input_embeddings().padding_idx = None  # the rows hold that token as a word
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    for step, (loss, norm, tokens, trained) in enumerate(first["figures"]):
        for backend in (alone, other):
            ((its_loss, its_norm, its_tokens, its_trained),) = steps_of(backend, range(step, step + 1))
            assert its_loss == pytest.approx(loss, abs=1e-5)
            assert its_norm == pytest.approx(norm, rel=1e-4)
            assert (its_tokens, its_trained) == (tokens, trained)
        assert torch_step(plain, uneven(step), optimizer) == (
            pytest.approx(loss, abs=1e-5),
            pytest.approx(norm, rel=1e-4),
        )
        if step >= 2:
            theirs = load_file(found / ("third.safetensors" if step == 2 else "fourth.safetensors"))
            plain.save_pretrained(tmp_path / str(step))
            assert furthest(theirs, exported(alone)) <= 1e-5
            assert furthest(theirs, exported(other)) <= 1e-5
            assert furthest(theirs, load_file(tmp_path / str(step) / "model.safetensors")) <= 1e-5


@pytest.mark.walk
@pytest.mark.parametrize(("writer", "reader"), [(fsdp, megatron), (megatron, fsdp)])
def test_a_checkpoint_of_one_backend_loads_in_the_other(
    writer: Callable[[Path], Backend], reader: Callable[[Path], Backend], folder: Path, tmp_path: Path
) -> None:
    first, second = writer(folder), reader(folder)
    first.freeze_reference()
    steps_of(first, range(2))
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert furthest(exported(first), exported(second)) == 0.0
    steps_of(first, range(2, 4))
    steps_of(second, range(2, 4))
    assert furthest(exported(first), exported(second)) <= 1e-5
    for ours, theirs in zip(*(b.logprobs(uneven(0), reference=True) for b in (first, second)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.walk
def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    model = make_tiny_moe(tmp_path / "model")
    backend = fsdp(model)
    backend.save(tmp_path / "state")
    path = tmp_path / "state" / "model.safetensors"
    tensors = load_file(path)
    cut = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.mlp.experts.2.up_proj.weight"}
    for damaged in (cut, {**tensors, "model.norm.weight": torch.ones(3)}, {**tensors, "more": torch.ones(3)}):
        save_file(damaged, str(path))
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            backend.load(tmp_path / "state")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        backend.load(tmp_path / "state")


def test_the_run_s_configuration_chooses(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    train = TrainConfig(backend="fsdp", logprob_chunk_tokens=7)
    settings = TrainerSettings(model=model, steps=1, train=train, optim=OptimConfig(weight_decay=0.25))
    made = make_backend(settings)
    assert isinstance(made, FsdpBackend)
    assert (made._settings.logprob_chunk, made._settings.optim.weight_decay) == (7, 0.25)
    with pytest.raises(TrainerError, match=r"\[megatron\] \(moe_z\) has no effect"):
        make_backend(TrainerSettings(model=model, steps=1, train=train, megatron={"moe_z": 1}))
    assert not isinstance(make_backend(TrainerSettings(model=model, steps=1)), FsdpBackend)


@pytest.mark.walk
def test_a_run_trains_with_it_and_its_first_ratio_is_one(tmp_path: Path) -> None:
    """A whole job of two steps after a short warm start: the engine's log p are this trainer's."""
    config = tiny_config(
        tmp_path,
        train={"backend": "fsdp", "logprob_chunk_tokens": 64},
        run={"name": "fsdp", "save_every": 2},
        algo={"kl_coef": 0.01},
        sft={"steps": 5},
    )
    job = Job(config)
    status, out, err = job.train()
    assert status == 0, out + err
    check_laws(job, steps=2)
    for entry in job.steps():
        assert entry["train/abs_dlogp/max"] < 1e-4
        assert abs(entry["train/ratio/max"] - 1) < 1e-4
    assert job.steps()[0]["train/kl_ref/mean"] == pytest.approx(0, abs=1e-6)
    assert (job.folder / "checkpoints" / "step_2" / "state" / "exp_avg.safetensors").is_file()
