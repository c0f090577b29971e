"""The router's list of workers. sglang-router and smg have the same three calls: GET, POST and DELETE /workers.

In: worker URLs. Out: whom the router sends requests to. Both changes are answered before they are made, so `add` and `remove` wait until
the list shows them, a bounded time. Requests that a removed worker has go on there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.server.types import EngineError
from palestra.server.workers.calls import Calls
from palestra.server.workers.types import Worker, WorkerState

CALL_S = 5.0
SHOWN_S = 10.0
"""How long a change may take to be seen in the list."""
POLL_S = 0.05
KEPT = ("worker_type", "bootstrap_port")
"""What a router must be told again of a worker that is no plain one (prefill and decode apart)."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to happen for the router's list to be ours."""

    remove: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    newcomers: tuple[str, ...] = ()
    """Workers that the router has and we do not know."""


def changes(listed: Collection[str], members: Collection[Worker], kept: Collection[str] = ()) -> Changes:
    """Compares the lists. `kept`: quarantined workers that may stay in the router's."""
    known = {worker.url for worker in members}
    serving = {worker.url for worker in members if worker.state is WorkerState.SERVING}
    return Changes(
        remove=tuple(sorted(url for url in listed if url in known - serving and url not in kept)),
        add=tuple(sorted(serving - set(listed))),
        newcomers=tuple(sorted(set(listed) - known)),
    )


class RouterApi:
    """The worker calls of one router."""

    def __init__(self, url: str, calls: Calls) -> None:
        self.url = url
        self._calls = calls
        self._told: dict[str, dict[str, Any]] = {}

    async def workers(self) -> dict[str, str]:
        """Worker URL -> the router's id of it.

        Raises:
            EngineError: the router does not answer, or not with a list.
        """
        answer = await self._calls.get(f"{self.url}/workers", CALL_S)
        rows = answer.get("workers")
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise EngineError(f"{self.url}/workers gives no list of workers: is it sglang-router or smg?")
        found = {}
        for row in rows:
            url = str(row.get("url", "")).rstrip("/")
            found[url] = str(row.get("id", ""))
            self._told[url] = _to_tell(row)
        return found

    async def add(self, url: str) -> None:
        """Puts a worker into the list; returns when it is there.

        Raises:
            EngineError: the router did not do it.
        """
        await self._change(url, there=True)

    async def remove(self, url: str) -> None:
        """Takes a worker out of the list; returns when it is gone. Harmless where it is not in it.

        Raises:
            EngineError: the router did not do it.
        """
        await self._change(url, there=False)

    async def _change(self, url: str, *, there: bool) -> None:
        loop = asyncio.get_running_loop()
        end, told = loop.time() + SHOWN_S, set[str]()
        while loop.time() < end:
            listed = await self.workers()
            if (url in listed) is there:
                return
            name = listed.get(url, url)
            if name not in told:  # a router that is started again meanwhile has the worker under another id
                told.add(name)
                if there:
                    await self._calls.post(f"{self.url}/workers", {"url": url, **self._told.get(url, {})}, CALL_S)
                else:
                    await self._calls.delete(f"{self.url}/workers/{name}", CALL_S)
            await asyncio.sleep(POLL_S)
        done = "added" if there else "removed"
        raise EngineError(f"the router {self.url} has not {done} {url} within {SHOWN_S:.0f} s")


def _to_tell(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("worker_type", "regular") == "regular":
        return {}
    return {name: row[name] for name in KEPT if row.get(name) is not None}
