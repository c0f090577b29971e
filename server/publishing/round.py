"""One publish as the engines see it: who takes part, holding and letting go, loads, and who is left out for what.

In: steps of the publisher. Out: control calls to every engine that still takes part. A worker that fails a step is quarantined and the
rest go on. Where none is left the publish fails, and engines whose weights are whole go on with those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from palestra.server.publishing.calls import unwilling
from palestra.server.publishing.types import Engines, Transport
from palestra.server.types import EngineError, EngineRefused, PublishMode
from palestra.server.workers.types import EngineKind, Worker, WorkerState

CONTROL_S = 60.0
"""How long an engine may take for a control call that loads nothing, seconds."""
ALIVE_S = 15.0
"""How long a serving engine has to show that it is there, busy as it may be."""
PROBE_S = 5.0
"""How long a quarantined engine has to show that it is there."""


class Round:
    """An open publish of one version."""

    def __init__(
        self, engines: Engines, kind: EngineKind, mode: PublishMode, deadline_s: float, version: int, train_step: int
    ) -> None:
        self.engines, self.kind, self.mode, self.deadline_s = engines, kind, mode, deadline_s
        self.version, self.train_step = version, train_step
        self.transport: Transport = "disk"
        self.workers: list[Worker] = []
        """Those that still take part."""
        self.left_out: dict[str, str] = {}
        self.calls, self.drain_s = 0, 0.0
        self.begun = False
        """Whether the engines were told that parts of weights come."""
        self.dirty = False
        """Whether engines may have some of the new weights in place of old ones; the embedded one loads all or nothing, at the end."""
        self._held_at: float | None = None
        self._held: list[Worker] = []

    @property
    def held(self) -> bool:
        """Whether the engines stand still."""
        return self._held_at is not None

    @property
    def still_s(self) -> float:
        """How long they have, seconds."""
        return 0.0 if self._held_at is None else time.monotonic() - self._held_at

    @property
    def flush(self) -> bool:
        """Whether engines forget their caches: all but `in_place`, whose running requests go on upon theirs."""
        return self.mode is not PublishMode.IN_PLACE

    def versioned(self, last: bool) -> dict[str, Any]:
        """What the last load call says beside the weights. The embedded engine is told at the end instead."""
        if not last:
            return {"flush_cache": False}
        named = {} if self.kind == "embedded" and self.begun else {"weight_version": str(self.version)}
        return {"flush_cache": self.flush, **named}

    async def gather(self) -> None:
        """Finds who takes part: the serving workers, and quarantined ones that answer. A dead one that is found here holds nobody up later.

        Raises:
            EngineError: there is none.
        """
        fleet = self.engines.fleet
        fleet.updating = True
        self.workers = list(fleet.serving())
        out = [worker for worker in fleet.members() if worker.state is WorkerState.QUARANTINED]
        known, late = await asyncio.gather(
            fleet.look(self.workers, "/model_info", timeout_s=ALIVE_S),
            fleet.look(out, "/model_info", timeout_s=PROBE_S),
        )
        self.workers += [worker for worker in out if worker.url in late.ok]
        await self.leave_out(known.failed)
        if not self.workers:
            names = ", ".join(f"{worker.url} ({worker.why})" for worker in fleet.members()) or "none is known"
            raise EngineError(f"version {self.version} has no engine to go to: {names}")

    async def hold(self) -> None:
        """Stops sampling in the way that the update mode says; harmless where it stands still already.

        Raises:
            EngineError: no engine obeyed, or running requests did not end in time.
        """
        if not self.held:
            if self.mode in (PublishMode.FINISH, PublishMode.ABORT):
                self.engines.gate.clear()
            if self.mode is PublishMode.FINISH:
                await self._drain()
            self._held_at, self._held = time.monotonic(), list(self.workers)
            # With nothing running, a pause only holds back what arrives meanwhile by other ways than ours.
            mode = PublishMode.RETRACT if self.mode is PublishMode.FINISH else self.mode
            await self.each("/pause_generation", lambda worker: {"mode": _pause_of(worker, mode).value})
        if self.transport in ("tensor", "distributed") and not self.begun:
            await self.all("/begin_weight_update", {})
            self.begun = True

    async def _drain(self) -> None:
        started = time.monotonic()
        while self.engines.on_wire:
            if time.monotonic() - started > self.deadline_s:
                raise EngineError(f"{self.engines.on_wire} requests did not finish within {self.deadline_s:.0f} s")
            await self.engines.idle.wait(1.0)
        self.drain_s = time.monotonic() - started

    async def all(self, path: str, payload: Mapping[str, Any], *, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        """One call with one payload to everybody who takes part; who fails is left out. Returns the answers by URL.

        Raises:
            EngineError: nobody is left.
        """
        answers = await self.engines.fleet.ask(self.workers, path, payload, timeout_s=timeout_s)
        await self.leave_out(unwilling(answers))
        return dict(answers.ok)

    async def each(self, path: str, payload_of: Any, *, timeout_s: float = CONTROL_S) -> None:
        """As `all`, with a payload for each worker.

        Raises:
            EngineError: nobody is left.
        """
        fleet = self.engines.fleet
        calls = (fleet.ask([worker], path, payload_of(worker), timeout_s=timeout_s) for worker in self.workers)
        failed: dict[str, EngineError] = {}
        for answers in await asyncio.gather(*calls):
            failed.update(unwilling(answers))
        await self.leave_out(failed)

    async def leave_out(self, failed: Mapping[str, EngineError | str]) -> None:
        """Quarantines workers. One that refused while all others did too is as good as before, unless parts of weights were loaded.

        Raises:
            EngineError: nobody is left.
        """
        if not failed:
            return
        gone = [worker for worker in self.workers if worker.url in failed]
        self.workers = [worker for worker in self.workers if worker.url not in failed]
        for worker in gone:
            fault = failed[worker.url]
            whole = isinstance(fault, EngineRefused) and not self.dirty
            if self.workers or not whole:
                self.left_out[worker.url] = str(fault)
                await self.engines.fleet.quarantine(worker, str(fault))
        if not self.workers:
            said = "; ".join(dict.fromkeys(str(fault) for fault in failed.values()))
            raise EngineError(f"no engine has version {self.version}: {said}")

    async def let_go(self) -> float:
        """Lets every engine that was held go on; returns how long they stood still, seconds. A worker that does not obey is quarantined.
        Opens the gate in any case."""
        fleet = self.engines.fleet
        try:
            if self._held:
                good = [worker for worker in self._held if worker.url not in self.left_out]
                bad = [worker for worker in self._held if worker.url in self.left_out]
                answers, _ = await asyncio.gather(
                    fleet.ask(good, "/continue_generation", {}, timeout_s=CONTROL_S),
                    fleet.ask(bad, "/continue_generation", {}, timeout_s=PROBE_S),
                )
                for worker in good:
                    if worker.url in answers.failed:
                        self.left_out[worker.url] = str(answers.failed[worker.url])
                        await fleet.quarantine(worker, self.left_out[worker.url])
            return self.still_s
        finally:
            self._held_at, self._held = None, []
            self.engines.gate.set()

    async def give_up(self) -> None:
        """Engines go on with what they have; those that have parts of the new weights are quarantined, since nobody knows what they are."""
        try:
            if self.dirty:
                parts = f"has parts of version {self.version}, whose publish was given up"
                for worker in self.workers:
                    self.left_out[worker.url] = parts
                    await self.engines.fleet.quarantine(worker, parts)
            elif self.begun and self.workers:
                await self.engines.fleet.ask(self.workers, "/end_weight_update", {}, timeout_s=PROBE_S)
        finally:
            try:
                await self.let_go()
            finally:
                self.engines.fleet.updating = False


def _pause_of(worker: Worker, mode: PublishMode) -> PublishMode:
    """What a late joiner still runs is nobody's: it would only stand in the way of the flush."""
    return PublishMode.ABORT if worker.state is WorkerState.QUARANTINED else mode
