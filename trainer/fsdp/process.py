"""The process group that parameters are sharded over: of the caller where it has set one up, else of this process alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def device() -> torch.device:
    """Where the model lies."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def ensure_mesh() -> DeviceMesh:
    """All ranks in one row. Sets up torch.distributed where nobody has; no port is opened then: the store is in memory."""
    kind = device().type
    if not dist.is_initialized():
        if kind == "cpu":
            # gloo would look up the host's name to choose an interface, which fails on machines that cannot resolve themselves.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=store, rank=0, world_size=1)
    return init_device_mesh(kind, (dist.get_world_size(),))
