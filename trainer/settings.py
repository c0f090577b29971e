"""Everything that one trainer needs to know of its run, and the backend made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agents.evaluation.config import EvalConfig
from palestra.trainer.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig, WeightsConfig

if TYPE_CHECKING:
    from palestra.trainer.megatron.backend import MegatronBackend


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


def make_backend(settings: TrainerSettings) -> MegatronBackend:
    """Builds the model of the run. Imports torch and megatron here, not before.

    Raises:
        ModelError: the model's folder cannot be trained.
        TrainerError: `[megatron]` has a wrong key or value.
    """
    import torch

    from palestra.trainer.megatron.backend import BackendSettings, MegatronBackend
    from palestra.trainer.megatron.optimizer import OptimSettings

    if settings.train.threads is not None:
        torch.set_num_threads(settings.train.threads)
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
        ),
    )
