"""The service's part in a process group of trainer and engines: joining, buckets, and what happens when it breaks.

In: an open publish and what the trainer is about to do. Out: as soon as one engine fails, who it was; at the end, who is left. Survivors of
a broken broadcast hang until rank 0, the trainer, leaves: so a failure is told at once and never waited out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.server.publishing.bodies import AnnounceBody, JoinBody
from palestra.server.publishing.calls import Spread
from palestra.server.publishing.round import CONTROL_S, PROBE_S, Round
from palestra.server.types import EngineRefused
from palestra.server.workers.types import Worker

GRACE_S = 5.0
"""How long an engine has to come out of a broadcast whose other side is gone."""


class GroupCalls:
    """The calls of one group at a time."""

    def __init__(self) -> None:
        self._spread: Spread | None = None

    async def join(self, current: Round, body: JoinBody) -> dict[str, str]:
        """Has every engine join; returns when all have, or as soon as one failed, with who it was and why."""
        rank = 1
        calls: dict[str, tuple[Worker, Mapping[str, Any]]] = {}
        for worker in current.workers:
            about = {
                "master_address": body.address,
                "master_port": body.port,
                "rank_offset": rank,
                "world_size": body.world_size,
                "group_name": body.group,
                "backend": body.backend,
            }
            calls[worker.url] = (worker, about)
            rank += worker.ranks
        return await self._each(current, calls, "/init_weights_update_group", body.timeout_s)

    async def announce(self, current: Round, body: AnnounceBody) -> dict[str, str]:
        """Tells every engine which tensors are in the bucket that is being broadcast; returns when all have them, or as soon as one
        failed, with who it was and why."""
        payload = {
            "names": body.names,
            "dtypes": body.dtypes,
            "shapes": body.shapes,
            "group_name": body.group,
            "load_format": "flattened_bucket",
            **current.versioned(body.last),
        }
        current.calls += 1
        calls = {worker.url: (worker, payload) for worker in current.workers}
        failed = await self._each(current, calls, "/update_weights_from_distributed", body.timeout_s)
        if current.kind == "sglang" and len(failed) < len(calls):
            current.dirty = True
        return failed

    async def _each(
        self, current: Round, calls: Mapping[str, tuple[Worker, Mapping[str, Any]]], path: str, timeout_s: float
    ) -> dict[str, str]:
        self._spread = Spread(current.engines.fleet, calls, path, timeout_s)
        return {url: str(error) for url, error in (await self._spread.until_failure()).items()}

    async def leave(self, current: Round, group: str) -> None:
        """After the trainer has left: frees the engines from the group and leaves out who broke it.

        An engine that was only caught in the broadcast refuses (400) once the trainer is gone. So whoever fails in another way is to
        blame; where nobody did, who failed before the trainer left; and where nobody did that either, who does not answer.

        Raises:
            EngineError: nobody is left.
        """
        fleet, spread, self._spread = current.engines.fleet, self._spread, None
        if spread is not None:
            before = dict(spread.failed)
            everyone = await spread.rest(GRACE_S)
            hard = {url: error for url, error in everyone.items() if not isinstance(error, EngineRefused)}
            if not (blamed := hard or before):
                blamed = dict((await fleet.look(current.workers, "/model_info", timeout_s=PROBE_S)).failed)
            await current.leave_out(blamed)
        # Refused where an engine is in no such group, which is as well; whoever does not answer will not join the next one either.
        await fleet.ask(current.workers, "/destroy_weights_update_group", {"group_name": group}, timeout_s=PROBE_S)
        if current.begun:
            await fleet.ask(current.workers, "/end_weight_update", {}, timeout_s=CONTROL_S)
            current.begun = False
