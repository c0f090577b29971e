"""The control half of a weight publish: what happens to running requests, and when the new policy version is in force.

In: begin, weights by one of the transports, end, from the trainer. Out: engines that serve the new version, verified, and the version on
record. Each engine is a case of its own: one that fails is quarantined and the rest go on. It waits for the engines, each call with a
deadline. A publish that no engine survives lets them go on with the weights they have and raises.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from palestra.server.publishing.bodies import AnnounceBody, CanaryBody, EndBody, HandlesBody, JoinBody
from palestra.server.publishing.calls import LOOK_S
from palestra.server.publishing.checks import canary_gaps, wrong_weights
from palestra.server.publishing.groups import GroupCalls
from palestra.server.publishing.loading import load_folder, load_shared, load_value, seal
from palestra.server.publishing.round import Round
from palestra.server.publishing.types import Engines, PublishReport, PublishTarget, TargetWorker, Transport, Versions
from palestra.server.types import EngineError, PublishMode, SessionError
from palestra.server.workers.types import EngineKind, Weights, Worker

Got = TypeVar("Got")


class Publisher:
    """One publish at a time."""

    def __init__(
        self, engines: Engines, kind: EngineKind, versions: Versions, mode: PublishMode, deadline_s: float
    ) -> None:
        self.engines, self.kind, self.versions, self.mode, self.deadline_s = engines, kind, versions, mode, deadline_s
        self._round: Round | None = None
        self._group = GroupCalls()
        self.last = PublishReport(0, 0.0, 0.0, 0, 0)
        """Of the last publish that came to its end."""
        self.quarantined = 0
        """Engines that publishes have left out."""

    @property
    def version(self) -> int | None:
        """The version that is being published; None where none is."""
        return None if self._round is None else self._round.version

    def figures(self) -> dict[str, float]:
        """Of the last publish, and over all."""
        return {
            "weights/still_s/mean": self.last.still_s,
            "weights/drain_s/mean": self.last.drain_s,
            "weights/serving/count": float(self.last.serving),
            "weights/quarantined/count": float(self.quarantined),
        }

    async def target(self) -> PublishTarget:
        """Who would get weights, were they published at this moment."""
        return await self._target(self.engines.fleet.serving() or self.engines.fleet.members())

    async def _target(self, workers: Sequence[Worker]) -> PublishTarget:
        infos = (await self.engines.fleet.look(workers, "/server_info", timeout_s=LOOK_S)).ok
        devices = {str(info.get("device", "cpu")) for info in infos.values()}
        who = tuple(TargetWorker(worker.url, worker.ranks) for worker in workers)
        return PublishTarget(self.kind, "cuda" if devices == {"cuda"} else "cpu", who)

    async def begin(self, version: int, train_step: int, transport: Transport) -> PublishTarget:
        """Puts the version on record and says who takes part. Engines go on until `hold`, or until weights come. A version that was left
        half-published by a trainer that died is given up first.

        Raises:
            SessionError: 409 where the version was published before.
            EngineError: there is no engine; all go on as they were.
        """
        if self._round is not None and self._round.version == version and not self._round.held:
            return await self._target(self._round.workers)  # the reply to this very call was lost
        if version <= (highest := self.versions.highest_version()):
            raise SessionError(
                f"version {version} cannot be published: {highest} was, and versions are never reused", 409
            )
        if self._round is not None:
            await self._give_up(self._round)
        current = self._round = Round(self.engines, self.kind, self.mode, self.deadline_s, version, train_step)
        current.transport = transport
        # On record before an engine can have it: a version whose publish was cut by a crash must never be used for other weights.
        await asyncio.to_thread(self.versions.record_publish, version, train_step)
        try:
            await current.gather()
            return await self._target(current.workers)
        except EngineError:
            await self._give_up(current)
            raise

    async def hold(self, version: int) -> None:
        """Has the engines stand still, as the update mode says.

        Raises:
            SessionError: 409 where this publish is not the open one.
            EngineError: no engine obeyed; the publish is given up.
        """
        current = self._current(version)
        await self._or_give_up(current, current.hold())

    async def bucket(self, blob: bytes) -> None:
        """A part of the weights by value (safetensors), handed to every engine: slow, and only for embedded engines.

        Raises:
            SessionError: 409 where no publish is open, 400 where the engines cannot read it.
            EngineError: no engine took it; the publish is given up.
        """
        current = self._current()
        if self.kind != "embedded":
            raise SessionError("SGLang engines take no weights by value: publish by disk, tensor or distributed")
        current.transport = "tensor"
        await self._or_give_up(current, load_value(current, base64.b64encode(blob).decode()))

    async def handles(self, body: HandlesBody) -> None:
        """A bucket in memory that trainer and engines share; returns when every engine has read it.

        Raises:
            SessionError: 409 where no publish is open.
            EngineError: no engine took it; the publish is given up.
        """
        current = self._current()
        await self._or_give_up(current, load_shared(current, body.payloads, body.load_format, last=body.last))

    async def join(self, body: JoinBody) -> dict[str, str]:
        """Has every engine join the trainer's process group; returns as soon as one fails, with who it was and why.

        Raises:
            SessionError: 409 where no publish is open.
        """
        return await self._group.join(self._current(), body)

    async def announce(self, body: AnnounceBody) -> dict[str, str]:
        """Tells every engine which tensors are being broadcast; returns when all have them, or as soon as one failed, with who and why.

        Raises:
            SessionError: 409 where no publish is open.
        """
        return await self._group.announce(self._current(), body)

    async def leave(self, group: str) -> PublishTarget:
        """After the trainer has left a process group: frees the engines from it and quarantines who broke it. Returns who is left, for a
        group of another name.

        Raises:
            SessionError: 409 where no publish is open.
            EngineError: nobody is left; the publish is given up.
        """
        current = self._current()
        await self._or_give_up(current, self._group.leave(current, group))
        return await self._target(current.workers)

    async def end(self, body: EndBody) -> PublishReport:
        """Loads (disk) or seals (the others) the new weights, verifies them on every engine, and lets generation go on.

        Raises:
            SessionError: 409 where this publish is not the open one.
            EngineError: no engine has the new weights; the version is not in force.
        """
        current = self._current(body.version)
        return await self._or_give_up(current, self._end(current, body))

    async def _end(self, current: Round, body: EndBody) -> PublishReport:
        if body.path is None:
            await seal(current)
        else:
            await load_folder(current, body.path)
        # From here on their version is the new one: what is wrong with them cannot be undone.
        current.dirty = True
        await current.leave_out(await wrong_weights(current, body))
        if self.mode is PublishMode.IN_PLACE:
            self.engines.salt = f"w{body.version}"
        still_s = await current.let_go()
        fleet = self.engines.fleet
        where = {"shared" if current.transport == "delta" else "folder": body.path}
        fleet.in_force(Weights(current.version, **where))
        current.workers = [worker for worker in current.workers if worker.url not in current.left_out]
        for worker in current.workers:
            await fleet.admit(worker, current.version)
        fleet.updating = False
        self.quarantined += len(current.left_out)
        self._round = None
        self.last = PublishReport(
            current.train_step, still_s, current.drain_s, current.calls, len(current.workers), dict(current.left_out)
        )
        return self.last

    async def cancel(self, version: int) -> None:
        """Gives a publish up: engines go on. Harmless where it is not the open one."""
        if self._round is not None and self._round.version == version:
            await self._give_up(self._round)

    async def canary(self, body: CanaryBody) -> dict[str, float]:
        """Compares logprobs of a text, computed by the trainer, with every serving engine's own; one that is too far off is quarantined.
        Returns the largest difference by engine.

        Raises:
            EngineError: all are too far off.
        """
        fleet = self.engines.fleet
        workers = fleet.serving()
        gaps, wrong = await canary_gaps(fleet, self.kind, body)
        if workers and all(worker.url in wrong for worker in workers):
            raise EngineError(f"no engine computes what the trainer does: {'; '.join(wrong.values())}")
        for worker in workers:
            if worker.url in wrong:
                self.quarantined += 1
                await fleet.quarantine(worker, wrong[worker.url])
        return {url: gap for url, gap in gaps.items() if url not in wrong}

    def _current(self, version: int | None = None) -> Round:
        if self._round is None:
            raise SessionError("no publish is open; POST /admin/publish/begin first", 409)
        if version is not None and version != self._round.version:
            raise SessionError(f"version {self._round.version} is being published, not {version}", 409)
        return self._round

    async def _or_give_up(self, current: Round, step: Coroutine[Any, Any, Got]) -> Got:
        try:
            return await step
        except SessionError:
            raise  # the call was wrong, and nothing was done: a right one may follow
        except BaseException:
            await self._give_up(current)
            raise

    async def _give_up(self, current: Round) -> None:
        self._round = None
        self.quarantined += len(current.left_out)
        await current.give_up()
