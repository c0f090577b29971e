"""The process group of a parallel run, and megatron's own groups inside it.

A process joins once (`join`) and may be arranged in one layout after another (`arrange`). Every wait ends with the group's deadline, as
torch's own error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from palestra.trainer.layout.types import Layout
from palestra.trainer.megatron.core import ON_CPU, model_parallel_cuda_manual_seed, parallel_state
from palestra.trainer.megatron.parallel.gloo import repair_collectives
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.group import LOOPBACK


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among those of a run."""

    rank: int
    world_size: int
    address: str
    """Of the TCP store that all of them meet at; somebody else, or rank 0 before it joins, listens there."""
    port: int
    deadline_s: float = 600.0
    """Seconds that any collective may take."""


def join(place: Place) -> None:
    """Waits until all processes of the run have come.

    Raises:
        TrainerError: this process is in a group already, or the others did not come in time.
    """
    if dist.is_initialized():
        raise TrainerError("this process is in a process group already")
    if place.address in LOOPBACK:
        # gloo would look up the host's own name, which fails on machines that cannot resolve themselves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not ON_CPU:
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    timeout = timedelta(seconds=place.deadline_s)
    try:
        store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo" if ON_CPU else "nccl", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    except (RuntimeError, OSError) as error:
        raise TrainerError(
            f"rank {place.rank} of {place.world_size} did not meet the others at {place.address}:{place.port}: {error}"
        ) from error
    repair_collectives()


def arrange(layout: Layout, seed: int = 1234) -> None:
    """Makes megatron's groups for `layout`; models of an earlier layout are of no use from then on.

    Raises:
        TrainerError: there is no group, or it has another size than the layout.
    """
    if not dist.is_initialized() or dist.get_world_size() != layout.gpus:
        there = dist.get_world_size() if dist.is_initialized() else 0
        raise TrainerError(f"a layout of {layout.gpus} ranks in a process group of {there}")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(seed)


def leave() -> None:
    """Waits for all ranks and takes the groups down."""
    dist.barrier()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
