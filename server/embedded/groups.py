"""Weight groups: this engine as one rank of a process group in which rank 0, a trainer, broadcasts new weights.

In: joins, receives and leaves from the HTTP surface. Out: tensors. A join waits until the group is complete and a receive for rank 0's
broadcasts, each for a bounded time and in a thread of its own, so that everything else is answered meanwhile. Leaving a group ends a
receive that waits in it.

The keys in the store are those that SGLang 0.5.23 uses (`init_custom_process_group` in its utils/common.py), so a trainer serves both kinds
of engine in one group.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from palestra.server.embedded.buckets import FLOATS, size_of, unfold
from palestra.server.embedded.types import TensorSlot, WeightsRefused

log = logging.getLogger(__name__)
T = TypeVar("T")
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a group meets, and who this engine is in it."""

    host: str
    port: int
    rank: int
    world_size: int
    backend: str


@dataclass(slots=True)
class _Group:
    process_group: Any
    device: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Broadcasts of a group follow one another."""
    left: asyncio.Event = field(default_factory=asyncio.Event)


class Groups:
    """The groups that this engine is in, by name."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[str, _Group] = {}

    async def join(self, name: str, place: GroupPlace) -> None:
        """Joins; a group of the same name is left first, as its trainer has begun anew.

        Raises:
            WeightsRefused: the backend is not there, or the group was not complete in time.
        """
        if place.backend not in BACKENDS:
            raise WeightsRefused(f"backend {place.backend!r} is not one of {', '.join(BACKENDS)}")
        if place.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise WeightsRefused("backend nccl needs a GPU and a torch with NCCL; this engine has gloo")
        if not 0 < place.rank < place.world_size:
            raise WeightsRefused(f"rank {place.rank} is no receiver in a group of {place.world_size}: rank 0 sends")
        self.leave(name)
        try:
            group = await aside(lambda: _join(name, place, self._timeout))
        except (RuntimeError, ValueError) as fault:  # torch's DistError is a RuntimeError
            raise WeightsRefused(f"group {name!r} at {place.host}:{place.port} was not joined: {fault}") from fault
        self._groups[name] = group
        log.info("rank %d of %d in group %s", place.rank, place.world_size, name)

    async def receive(self, name: str, slots: Sequence[TensorSlot], *, flattened: bool) -> dict[str, torch.Tensor]:
        """The tensors that rank 0 broadcasts next, one by one or, `flattened`, as one run of bytes.

        Raises:
            WeightsRefused: there is no such group, or they did not come in time.
        """
        group = self._groups.get(name)
        if group is None:
            raise WeightsRefused(f"group {name!r} was not joined; POST /init_weights_update_group first")
        async with group.lock:
            try:
                return await _unless_left(name, group, lambda: _receive(group, slots, flattened=flattened))
            except RuntimeError as fault:
                raise WeightsRefused(f"the weights in group {name!r} did not come: {fault}") from fault

    def leave(self, name: str) -> bool:
        """Leaves a group; whether there was one. A receive in it ends with an error."""
        group = self._groups.pop(name, None)
        if group is None:
            return False
        group.left.set()
        try:
            group.process_group.abort()
        except RuntimeError as fault:
            log.warning("group %s was left, but not in order: %s", name, fault)
        return True

    def close(self) -> None:
        """Leaves all groups."""
        for name in list(self._groups):
            self.leave(name)


async def _unless_left(name: str, group: _Group, work: Callable[[], T]) -> T:
    """Ends with an error when the group is left meanwhile, which gloo itself would not do.

    In torch 2.13 gloo's `abort` ends the wait of neither side. Connections close when the last reference to the process group goes, and
    dropping that blocks while an operation waits. So the thread is left alone with that reference: its wait ends at the group's
    timeout, or as soon as rank 0 drops its own end.
    """
    working, left = asyncio.ensure_future(aside(work)), asyncio.ensure_future(group.left.wait())
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise WeightsRefused(f"group {name!r} was left before the weights came")
        return await working
    finally:
        working.cancel()
        left.cancel()


async def aside(function: Callable[[], T]) -> T:
    """Runs a call that may wait long in a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, fault: BaseException | None) -> None:
        if future.done():
            return
        if fault is not None:
            future.set_exception(fault)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001 - handed to the caller, whatever it is
            fault = raised
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=work, daemon=True, name="weight-group").start()
    return await future


def _join(name: str, place: GroupPlace, timeout: timedelta) -> _Group:
    store = dist.TCPStore(place.host, place.port, None, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    device = "cpu" if place.backend == "gloo" else "cuda"
    named = PrefixStore(f"{name}/", PrefixStore(name, store))
    inner = PrefixStore(f"{device}/", named)
    if place.backend == "gloo":
        return _Group(dist.ProcessGroupGloo(inner, place.rank, place.world_size, timeout), device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _Group(dist.ProcessGroupNCCL(inner, place.rank, place.world_size, options), device)


def _receive(group: _Group, slots: Sequence[TensorSlot], *, flattened: bool) -> dict[str, torch.Tensor]:
    if flattened:
        flat = torch.empty(sum(map(size_of, slots)), dtype=torch.uint8, device=group.device)
        group.process_group.broadcast([flat], dist.BroadcastOptions()).wait()
        return unfold(flat.cpu(), slots)
    tensors = [torch.empty(slot.shape, dtype=FLOATS[slot.dtype], device=group.device) for slot in slots]
    works = [group.process_group.broadcast([tensor], dist.BroadcastOptions()) for tensor in tensors]
    for work in works:
        work.wait()
    return {slot.name: tensor.cpu() for slot, tensor in zip(slots, tensors, strict=True)}


def in_a_row(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[TensorSlot, ...]:
    """The tensors of a broadcast; flattened, they follow one another without gaps.

    Raises:
        WeightsRefused: the lists do not belong together, or a type is not known.
    """
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise WeightsRefused(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes are no list of tensors"
        )
    slots, at = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in FLOATS:
            raise WeightsRefused(f"{name}: dtype {dtype!r} is not one of {', '.join(FLOATS)}")
        slots.append(TensorSlot(name, dtype, tuple(shape), at))
        at += math.prod(shape) * FLOATS[dtype].itemsize
    return tuple(slots)
