"""Weight updates of the fake engine: collected beside the weights in force, checked, and put in at once.

torch is loaded only by a weight group: its process group is torch's own, as a trainer's is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file

from palestra.server.embedded import wire_weights as wire
from palestra.server.embedded.types import WeightsRefused
from tests.fakes.tiny_core import TinyCore
from tests.fakes.tiny_model import Floats

WAIT_S = 30.0
"""For the other rank of a group."""


def read_folder(folder: Path) -> dict[str, Floats]:
    """All weights of a model folder.

    Raises:
        WeightsRefused: there are none.
    """
    try:
        weights: dict[str, Floats] = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as fault:
        raise WeightsRefused(f"{folder} cannot be read: {fault}") from fault
    return weights


class TinyUpdates:
    """See the module. All methods run on the engine's loop."""

    def __init__(self, core: TinyCore) -> None:
        self._core = core
        self._staged: dict[str, Floats] | None = None
        self._version: str | None = None
        self._groups: dict[str, Any] = {}

    def begin(self) -> None:
        """Opens an update; one that was left open is forgotten."""
        self._staged, self._version = {}, None

    def end(self, version: str | None) -> None:
        """Puts in what was collected; nothing at all, without a version, just closes.

        Raises:
            WeightsRefused: none is open, or weights are missing.
        """
        staged, self._staged = self._open(), None
        version = version or self._version
        if not staged and not version:
            return
        if missing := sorted(set(self._core.weights) - set(staged)):
            raise WeightsRefused(f"missing tensors: {missing}")
        self._put_in(staged, version)

    def from_disk(self, body: wire.DiskBody) -> None:
        """All weights from a folder."""
        self._put_in(read_folder(Path(body.model_path)), body.weight_version)

    def from_tensors(self, body: wire.TensorBody) -> None:
        """Weights by value.

        Raises:
            WeightsRefused: they cannot be read or do not fit.
        """
        try:
            blobs = [load(base64.b64decode(blob, validate=True)) for blob in body.serialized_named_tensors]
        except (binascii.Error, SafetensorError) as fault:
            raise WeightsRefused(f"serialized_named_tensors: {fault}") from fault
        given = {name: array for blob in blobs for name, array in blob.items()}
        if self._staged is None:
            self._put_in(given, body.weight_version)
        else:
            self._collect(self._staged, given, body.weight_version)

    async def from_group(self, body: wire.BroadcastBody) -> None:
        """Weights that rank 0 broadcasts next.

        Raises:
            WeightsRefused: no update is open, there is no such group, or they did not come.
        """
        staged = self._open()
        if body.group_name not in self._groups:
            raise WeightsRefused(f"group {body.group_name!r} was not joined")
        try:
            given = await asyncio.to_thread(_receive, self._groups[body.group_name], body)
        except RuntimeError as fault:
            raise WeightsRefused(f"the weights in group {body.group_name!r} did not come: {fault}") from fault
        if self._staged is not staged:
            raise WeightsRefused("the update ended before these weights were there")
        self._collect(staged, given, body.weight_version)

    async def join(self, body: wire.GroupBody) -> None:
        """Becomes a rank of a group.

        Raises:
            WeightsRefused: it was not complete in time.
        """
        try:
            self._groups[body.group_name] = await asyncio.to_thread(_join, body)
        except RuntimeError as fault:
            raise WeightsRefused(f"group {body.group_name!r} was not joined: {fault}") from fault

    def leave(self, name: str) -> None:
        """Closes the connections of a group.

        Raises:
            WeightsRefused: it is in no such group.
        """
        if self._groups.pop(name, None) is None:
            raise WeightsRefused(f"group {name!r} was not joined")

    def checksums(self) -> dict[str, str]:
        """As engines have them: 16 digits of sha256 over the bytes."""
        return {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in self._core.weights.items()}

    def _open(self) -> dict[str, Floats]:
        if self._staged is None:
            raise WeightsRefused("no weight update was begun; POST /begin_weight_update first")
        return self._staged

    def _collect(self, staged: dict[str, Floats], given: Mapping[str, Floats], version: str | None) -> None:
        self._check(given)
        staged.update(given)
        self._version = version or self._version

    def _put_in(self, given: Mapping[str, Floats], version: str | None) -> None:
        self._check(given)
        if not version:
            raise WeightsRefused("weight_version is missing")
        self._core.put_in({**self._core.weights, **given}, version)

    def _check(self, given: Mapping[str, Floats]) -> None:
        for name, array in given.items():
            known = self._core.weights.get(name)
            if known is None or known.shape != array.shape or known.dtype != array.dtype:
                raise WeightsRefused(f"{name}: {array.dtype} {array.shape} is no weight of this model")
            if not np.isfinite(array).all():
                raise WeightsRefused(f"{name} has numbers that are not finite")


def _join(body: wire.GroupBody) -> Any:
    import torch.distributed as dist

    wait = timedelta(seconds=WAIT_S)
    store = dist.TCPStore(body.master_address, body.master_port, None, is_master=False, timeout=wait)
    named = dist.PrefixStore(f"{body.group_name}/", dist.PrefixStore(body.group_name, store))
    return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", named), body.rank_offset, body.world_size, wait)


def _receive(group: Any, body: wire.BroadcastBody) -> dict[str, Floats]:
    import torch
    import torch.distributed as dist

    def receive(tensor: torch.Tensor) -> Floats:
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        array: Floats = tensor.numpy()
        return array

    dtypes = [np.dtype(name) for name in body.dtypes]
    if body.load_format is None:
        places = zip(body.shapes, body.dtypes, strict=True)
        arrays = [receive(torch.empty(shape, dtype=getattr(torch, dtype))) for shape, dtype in places]
        return dict(zip(body.names, arrays, strict=True))
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(body.shapes, dtypes, strict=True)]
    parts = np.split(receive(torch.empty(sum(sizes), dtype=torch.uint8)), np.cumsum(sizes)[:-1])
    rows = zip(body.names, parts, dtypes, body.shapes, strict=True)
    return {name: part.view(dtype).reshape(shape) for name, part, dtype, shape in rows}
