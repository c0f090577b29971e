"""Everything that one trainer needs to know of its run, and the backend made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.agents.evaluation.config import EvalConfig
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig
from palestra.trainer.types import Backend, TrainerError


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The sections that concern the trainer, and the numbers of the run."""

    model: Path
    """A Hugging Face folder."""
    steps: int
    """Training steps of the whole run."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    sft: SftConfig | None = None
    eval: EvalConfig | None = None
    """Evaluations while it trains; None: none."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    save_every: int = 10
    """Steps between checkpoints; the last step always has one."""
    publish_steps: int = 1
    """Steps between publishes; the last step always makes one."""
    keep_checkpoints: int = 2
    off_policy: bool = False
    """Whether the schedule lets tokens be older than the weights that they train."""
    colocated: bool = False
    """Whether engines rest while a step trains."""
    wait_s: float = 1800.0
    """Longest wait for groups, seconds."""
    lease_s: float = 120.0
    """How long claimed groups stay ours without a renewal, seconds."""
    owner: str = "trainer"
    """The leases' owner; the same after a restart."""
    config_hash: str = ""


def make_backend(settings: TrainerSettings) -> Backend:
    """Builds the model of the run. Imports torch, and megatron or transformers, here and not before.

    Raises:
        ModelError: the model's folder cannot be trained.
        TrainerError: `[megatron]` has a wrong key or value, or says anything to another backend.
    """
    import torch

    if settings.train.threads is not None:
        torch.set_num_threads(settings.train.threads)
    return _fsdp(settings) if settings.train.backend == "fsdp" else _megatron(settings)


def _megatron(settings: TrainerSettings) -> Backend:
    from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
    from palestra.trainer.megatron.optimizer import OptimSettings

    optim = settings.optim
    return MegatronBackend.from_folder(
        settings.model,
        BackendSettings(
            optim=OptimSettings(
                weight_decay=optim.weight_decay, betas=optim.betas, eps=optim.eps, clip_grad=optim.clip_grad
            ),
            dtype=settings.train.dtype,
            logprob_chunk=settings.train.logprob_chunk_tokens,
            megatron=settings.megatron,
            entropy="trained" if settings.algo.entropy_coef else "told" if settings.train.entropy else "none",
        ),
    )


def _fsdp(settings: TrainerSettings) -> Backend:
    if settings.megatron:
        named = ", ".join(sorted(settings.megatron))
        raise TrainerError(f'[megatron] ({named}) has no effect when train.backend is "fsdp": remove it')
    if settings.algo.entropy_coef:
        raise TrainerError('algo.entropy_coef needs train.backend = "megatron": this one tells no entropies')
    from palestra.trainer.fsdp.backend import FsdpBackend, FsdpSettings

    train = settings.train
    given = FsdpSettings(settings.optim, train.dtype, train.logprob_chunk_tokens)
    return FsdpBackend.from_folder(settings.model, given)


def check_programs(settings: TrainerSettings) -> None:
    """Loads the loss and the advantage that the user wrote, where there are such: before rollouts are played for them.

    Raises:
        TrainerError: one is not there, or is none.
    """
    from palestra.trainer.advantages.own import load_advantage
    from palestra.trainer.step import loss_of

    loss_of(settings)
    if settings.algo.advantage is not None:
        load_advantage(settings.algo.advantage)
