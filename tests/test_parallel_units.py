"""The parallel backend without other ranks: refusals, who runs what, how tensors are cut, and one rank through the backends' suite."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from palestra.trainer.layout.types import Layout
from palestra.trainer.megatron.backend import BackendSettings
from palestra.trainer.megatron.families import Architecture
from palestra.trainer.megatron.optimizer import OptimSettings
from palestra.trainer.megatron.parallel import process
from palestra.trainer.megatron.parallel.backend import ParallelBackend
from palestra.trainer.megatron.parallel.batches import turns
from palestra.trainer.megatron.parallel.model import parallel_config
from palestra.trainer.megatron.parallel.refusals import check
from palestra.trainer.megatron.parallel.shards import Cut, Local, join, take
from palestra.trainer.megatron.process import ensure_process_group
from palestra.trainer.types import Backend, ModelError, TrainerError
from tests.conformance.backend_suite import BETAS, CLIP, DECAY, EPS, BackendSuite, MakeBackend, folder, micro_batch

__all__ = ["folder"]

MOE = Architecture("qwen3_moe", 4, 64, 4, 2, 32, 48, 467, 1e-6, 1e4, 256, tied=False, experts=4, topk=2, qk_norm=True)


@pytest.mark.ci
class TestOneRank(BackendSuite):
    """The same suite as `MegatronBackend`'s, in a group of one."""

    @pytest.fixture
    def make(self) -> MakeBackend:
        def build(folder: Path, *, chunk: int = 0) -> Backend:
            ensure_process_group()
            optim = OptimSettings(weight_decay=DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP)
            settings = BackendSettings(optim=optim, logprob_chunk=chunk)
            return ParallelBackend.from_folder(folder, Layout(gpus=1), settings)

        return build


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        (Layout(gpus=3, tp=2, etp=2, sp=True), "P201"),
        (Layout(gpus=2, ep=4), "P202"),
        (Layout(gpus=3, ep=3), "P203"),
        (Layout(gpus=8, tp=8, etp=8, sp=True), "P204"),
        (Layout(gpus=4, tp=4, etp=4, sp=True), "P206"),
        (Layout(gpus=3, pp=3), "P207"),
        (Layout(gpus=1, vpp=2), "P208"),
        (Layout(gpus=2, pp=2, vpp=4), "P209"),
        (Layout(gpus=2, tp=2, etp=2), "P211"),
        (Layout(gpus=2, tp=2, sp=True), "P212"),
        (Layout(gpus=2, distributed_optimizer=False), "distributed optimizer"),
    ],
)
def test_wrong_layouts_are_refused_by_the_planners_code(layout: Layout, code: str) -> None:
    with pytest.raises(TrainerError, match=code):
        check(MOE, layout)
    check(MOE, Layout(gpus=2, ep=2))


def test_a_family_that_no_layout_was_tried_with_is_refused_by_name() -> None:
    latent = dataclasses.replace(MOE, family="deepseek_v3")
    with pytest.raises(TrainerError, match="not built: deepseek_v3 over several processes"):
        check(latent, Layout(gpus=2, ep=2))


@pytest.mark.parametrize("key", ["overlap_p2p_comm", "pipeline_model_parallel_layout"])
def test_a_key_that_the_layout_sets_cannot_be_passed_through(key: str) -> None:
    with pytest.raises(TrainerError, match=f"megatron.{key} cannot be set here"):
        parallel_config(MOE, Layout(gpus=2, pp=2), {key: None})


def test_a_layout_that_was_not_arranged_is_refused() -> None:
    ensure_process_group()
    with pytest.raises(TrainerError, match="arranged are"):
        ParallelBackend(MOE, Layout(gpus=2, ep=2), BackendSettings())
    with pytest.raises(TrainerError, match="a layout of 2 ranks in a process group of 1"):
        process.arrange(Layout(gpus=2, ep=2))
    with pytest.raises(TrainerError, match="in a process group already"):
        process.join(process.Place(0, 1, "127.0.0.1", 1))


def test_every_rank_runs_as_many_micro_batches_and_each_batch_runs_once() -> None:
    batches = [micro_batch([list(range(size))], [1], 1.0) for size in (9, 20, 4)]
    for ranks in (1, 2, 3, 4, 5):
        for multiple in (1, 2):
            shares = turns(batches, ranks, multiple)
            counts = {len(share) for share in shares}
            assert len(shares) == ranks
            assert len(counts) == 1
            assert not counts.pop() % multiple
            assert sorted(turn.index for share in shares for turn in share if turn.index >= 0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "dim", "shape"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", 0, (24, 5)),
        ("decoder.layers.0.mlp.linear_fc2.weight", 1, (5, 12)),
        ("output_layer.weight", 0, (11, 5)),
    ],
)
def test_parts_of_a_tensor_make_the_tensor(name: str, dim: int, shape: tuple[int, int]) -> None:
    arch = Architecture("llama", 1, 5, 1, 1, 5, 12, shape[0], 1e-6, 1e4, 64, tied=False)
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    part = list(shape)
    part[dim] = -(-part[dim] // 3)
    cut = Cut(name, dim, 3, tuple(part))
    here = [Local(cut, index, True, torch.nn.Parameter(torch.empty(part))) for index in range(3)]
    parts = [take(whole, local) for local in here]
    assert torch.equal(join(parts, cut, arch), whole)
    if "fc1" in name:
        assert torch.equal(parts[1], torch.cat([whole[4:8], whole[16:20]])), "gate and up are cut each by itself"
    with pytest.raises(ModelError):
        take(whole[:, :3], here[0])
