"""The process group of a single process: megatron asks for its groups even where there is nobody to talk to."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from palestra.trainer.megatron.core import ON_CPU, model_parallel_cuda_manual_seed, parallel_state


def device() -> torch.device:
    """Where the model lies."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def ensure_process_group(seed: int = 1234) -> None:
    """Sets up torch.distributed and megatron's groups once per process. No port is opened: the store is in memory."""
    if not dist.is_initialized():
        if ON_CPU:
            # gloo would look up the host's name to choose an interface, which fails on machines that cannot resolve themselves.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if ON_CPU else "nccl", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(seed)
