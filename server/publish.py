"""The control half of a weight publish: what happens to running requests, and when the new policy version is in force.

In: begin, buckets or a folder, end, from the trainer. Out: engines that serve the new version, verified, and the version on record. It
waits for the engines, each call with a deadline. A publish that fails lets the engines go on with the weights they have and raises.
"""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import dataclass

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.engine import EngineClient
from palestra.server.engine_wire import version_of
from palestra.server.types import EngineError, PublishMode, SessionError


@dataclass(slots=True)
class _Open:
    version: int
    train_step: int
    started: float
    buckets: int = 0


class Publisher:
    """One publish at a time."""

    def __init__(self, engine: EngineClient, buffer: EmbeddedBuffer, mode: PublishMode, deadline_s: float) -> None:
        self.engine, self.buffer, self.mode, self.deadline_s = engine, buffer, mode, deadline_s
        self._open: _Open | None = None
        self.last_seconds = 0.0
        """How long the engines stood still in the last publish."""

    @property
    def version(self) -> int | None:
        """The version that is being published; None where none is."""
        return None if self._open is None else self._open.version

    async def begin(self, version: int, train_step: int) -> None:
        """Stops generation in the way that the update mode says. A version that was left half-published by a trainer that died is
        given up first.

        Raises:
            SessionError: 409 where the version was published before.
            EngineError: an engine did not obey; all go on as they were.
        """
        highest = self.buffer.highest_version()
        if version <= highest:
            raise SessionError(
                f"version {version} cannot be published: {highest} was, and versions are never reused", 409
            )
        if self._open is not None:
            await self._resume()
        self._open = _Open(version, train_step, time.monotonic())
        # On record before an engine can have it: a version whose publish was cut by a crash must never be used for other weights.
        await asyncio.to_thread(self.buffer.record_publish, version, train_step)
        try:
            await self._hold()
        except EngineError:
            await self._resume()
            raise

    async def bucket(self, blob: bytes) -> None:
        """A part of the weights by value (safetensors), handed to every engine.

        Raises:
            SessionError: 409 where no publish is open.
            EngineError: an engine refused it; the publish is given up.
        """
        current = self._current()
        try:
            if current.buckets == 0:
                await self.engine.control("/begin_weight_update", {})
            current.buckets += 1
            payload = {"serialized_named_tensors": [base64.b64encode(blob).decode()], "load_format": "safetensors"}
            await self.engine.control("/update_weights_from_tensor", payload)
        except EngineError:
            await self._resume()
            raise

    async def end(self, version: int, path: str | None) -> int:
        """Loads (disk) or seals (buckets) the new weights, verifies the version on every engine, and lets generation go on. Returns the
        train step whose weights these are.

        Raises:
            SessionError: 409 where this publish is not the open one.
            EngineError: an engine has other weights now; the version is not in force.
        """
        current = self._current()
        if version != current.version:
            raise SessionError(f"version {current.version} is being published, not {version}", 409)
        try:
            if path is not None:
                load = {"model_path": path, "weight_version": str(version), "flush_cache": True}
                await self.engine.control("/update_weights_from_disk", load, timeout_s=self.deadline_s)
            else:
                await self.engine.control(
                    "/end_weight_update", {"weight_version": str(version)}, timeout_s=self.deadline_s
                )
            await self._verify(version)
        finally:
            await self._resume()
        self.last_seconds = time.monotonic() - current.started
        return current.train_step

    def _current(self) -> _Open:
        if self._open is None:
            raise SessionError("no publish is open; POST /admin/publish/begin first", 409)
        return self._open

    async def _hold(self) -> None:
        if self.mode is not PublishMode.FINISH:
            await self.engine.control("/pause_generation", {"mode": self.mode.value})
            return
        self.engine.gate.clear()
        deadline = time.monotonic() + self.deadline_s
        while self.engine.on_wire:
            if time.monotonic() > deadline:
                raise EngineError(f"{self.engine.on_wire} requests did not finish within {self.deadline_s:.0f} s")
            await self.engine.idle.wait(1.0)
        # With nothing running, a pause only holds back what arrives meanwhile by other ways than ours.
        await self.engine.control("/pause_generation", {"mode": PublishMode.RETRACT.value})

    async def _verify(self, version: int) -> None:
        for worker, info in zip(self.engine.workers, await self.engine.info(), strict=True):
            if (found := version_of(info.get("weight_version", ""))) != version:
                raise EngineError(f"{worker} serves version {found} after the publish of {version}")

    async def _resume(self) -> None:
        self._open = None
        try:
            await self.engine.control("/continue_generation", {})
        finally:
            self.engine.gate.set()
