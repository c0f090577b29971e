"""A process group of the trainer (rank 0) and all engines, through which weights are broadcast.

In: the number of ranks, a name. Out: a group that is joined, broadcasts, or fails and is left. Engines build the same group on their side,
so the order of the store's prefixes is a wire contract: SGLang's keys are NAME/NAME//DEVICE//... Only public names of torch are used, and
the default process group, if there is one, stays untouched. Every wait ends with the group's timeout; `abort` ends it at once.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from palestra.trainer.types import TrainerError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def address_towards(url: str) -> str:
    """The address of this machine that an engine at `url` can reach.

    Raises:
        TrainerError: there is no way to it.
    """
    place = urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((place.hostname or "", place.port or 80))  # sends nothing: it only chooses an interface
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TrainerError(f"no way from here to {url}: {error}") from error


class WeightGroup:
    """Rank 0's side of one group. A name is used once."""

    def __init__(self, name: str, address: str, world_size: int, backend: str, timeout_s: float) -> None:
        """Opens the store at a free port; nobody has joined yet.

        Raises:
            TrainerError: the address cannot be listened on.
        """
        self.name, self.address, self.world_size, self.backend = name, address, world_size, backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        if address in LOOPBACK:
            # gloo would look up the host's own name, which other processes on it cannot always reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            self._store: Any = TCPStore(address, 0, None, is_master=True, wait_for_workers=False, timeout=self._timeout)
        except (RuntimeError, OSError) as error:
            raise TrainerError(f"weight group {name}: no store at {address}: {error}") from error
        self.port = int(self._store.port)

    def join(self) -> None:
        """Waits for all engines.

        Raises:
            RuntimeError: they did not come in time (torch's own).
        """
        device = "cuda" if self.backend == "nccl" else "cpu"
        inner = PrefixStore(self.name, self._store)
        store = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", inner))
        if self.backend == "nccl":
            nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
            if nccl is None:
                raise RuntimeError("this torch has no NCCL")
            options = nccl.Options()
            options._timeout = self._timeout
            self._group = nccl(store, 0, self.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, self._timeout)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Sends a bucket to everybody.

        Raises:
            RuntimeError: somebody is gone, or did not take it in time (torch's own).
        """
        self._group.broadcast([flat], dist.BroadcastOptions()).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def abort(self) -> None:
        """Leaves: ends what goes on and closes the store, which frees engines that wait in either."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()
