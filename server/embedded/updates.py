"""Weight updates: what the HTTP surface asks about weights, put between the engine's steps.

In: folders, buckets, broadcasts. Out: new weights in force under their version. Waits for disk, memory and rank 0, never longer than told;
generation goes on meanwhile unless it was paused.

Between begin and end everything is only collected, beside the weights in force. So an update that is cut anywhere (a trainer that dies, a
bucket that never comes, an end that finds tensors missing) leaves the old weights, their version and the prefix store as they were; the
next begin forgets what was collected.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from palestra.server.embedded.buckets import describe, read_blobs, read_segment
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.groups import GroupPlace, Groups
from palestra.server.embedded.types import TensorSlot, WeightsRefused
from palestra.server.embedded.weights import read_folder

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]


class Updates:
    """The updates of one engine. All methods run on its event loop."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        """`timeout_s` bounds the waits for a group's other ranks, seconds."""
        self._engine = engine
        self._staged: Tensors | None = None
        self._version: str | None = None
        self.groups = Groups(timeout_s)

    async def begin(self) -> None:
        """Opens an update: what comes until `end` is put in at once by it. An update that was left open is forgotten."""
        async with self._engine.between_steps():
            self._staged, self._version = {}, None

    async def from_folder(self, folder: str, version: str | None) -> bool:
        """All weights from a Hugging Face folder, at once (True) or, within an open update, at its end (False).

        Raises:
            WeightsRefused: they cannot be read or do not fit; nothing was changed.
        """
        return await self._update(functools.partial(read_folder, folder), version, complete=True)

    async def from_blobs(self, blobs: list[str], version: str | None) -> None:
        """Some weights by value: collected within an open update, otherwise put in at once.

        Raises:
            WeightsRefused: they cannot be read or do not fit; nothing was changed.
        """
        await self._update(functools.partial(read_blobs, blobs), version, complete=False)

    async def from_segments(self, segments: list[str], version: str | None) -> None:
        """Some weights from shared memory of this host, like `from_blobs`.

        Raises:
            WeightsRefused: they cannot be read or do not fit; nothing was changed.
        """
        told = [describe(segment) for segment in segments]
        self._engine.core.views.expect([slot for _, _, slots in told for slot in slots])

        def read() -> Tensors:
            tensors: Tensors = {}
            for one in told:
                tensors.update(read_segment(*one))
            return tensors

        await self._update(read, version, complete=False)

    async def from_group(self, name: str, slots: Sequence[TensorSlot], version: str | None, *, flattened: bool) -> None:
        """Some weights that rank 0 broadcasts, within an open update only, as in SGLang.

        Raises:
            WeightsRefused: no update is open, they do not fit, or they did not come; nothing was changed.
        """
        staged = self._open()
        self._engine.core.views.expect(slots)
        tensors = await self.groups.receive(name, slots, flattened=flattened)
        async with self._engine.between_steps():
            if self._staged is not staged:
                raise WeightsRefused("the update ended before these weights were there")
            staged.update(tensors)
            self._version = version or self._version

    async def end(self, version: str | None) -> None:
        """Puts in what was collected; where that is nothing at all, and no version is named, the update is just closed.

        Raises:
            WeightsRefused: no update is open, or it is not complete; nothing was changed, and the update is closed.
        """
        async with self._engine.between_steps():
            staged, self._staged = self._open(), None
            version = version or self._version
            if staged or version:
                await self._load(staged, version, complete=True)

    async def join(self, name: str, place: GroupPlace) -> None:
        """Joins a weight group.

        Raises:
            WeightsRefused: it was not complete in time, or cannot be.
        """
        await self.groups.join(name, place)

    def leave(self, name: str) -> None:
        """Leaves a weight group.

        Raises:
            WeightsRefused: this engine is not in it.
        """
        if not self.groups.leave(name):
            raise WeightsRefused(f"group {name!r} was not joined")

    async def checksums(self, skip: Sequence[str]) -> dict[str, Any]:
        """SGLang's answer to the checksum action, for one rank, with Hugging Face names and their shapes."""
        async with self._engine.between_steps():
            sums, shapes = await self._engine.in_thread(self._engine.core.views.checksums, skip)
        whole = hashlib.sha256("".join(name + sums[name] for name in sorted(sums)).encode()).hexdigest()
        alone = {
            "tp_rank": 0,
            "tp_size": 1,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "rank": 0,
            "size": 1,
        }
        rank = {
            "checksums": sums,
            "shapes": shapes,
            "per_gpu_checksum": whole,
            "parallelism_info": [{"role": "target", **alone}],
        }
        return {"ranks": [rank], "per_engine_checksum": hashlib.sha256(whole.encode()).hexdigest()}

    def close(self) -> None:
        """Ends every wait for other ranks."""
        self.groups.close()

    def _open(self) -> Tensors:
        if self._staged is None:
            raise WeightsRefused("no weight update was begun; POST /begin_weight_update first")
        return self._staged

    async def _update(self, read: Callable[[], Tensors], version: str | None, *, complete: bool) -> bool:
        async with self._engine.between_steps():
            tensors = await self._engine.in_thread(read)
            if self._staged is None:
                await self._load(tensors, version, complete=complete)
                return True
            self._staged.update(tensors)
            self._version = version or self._version
            return False

    async def _load(self, tensors: Tensors, version: str | None, *, complete: bool) -> None:
        """Without a pause, running requests are retracted first: frozen ones keep their cache on the caller's wish only."""
        if not version:
            raise WeightsRefused("weight_version is missing: tokens of old and new weights could not be told apart")
        engine = self._engine
        await engine.in_thread(engine.core.views.check, tensors, complete=complete)
        if not engine.paused:
            await engine.in_thread(engine.core.retract_all)
        started = time.perf_counter()
        await engine.in_thread(engine.core.load, tensors, version)
        log.info("weights %s put in within %.3f s", engine.core.version, time.perf_counter() - started)
