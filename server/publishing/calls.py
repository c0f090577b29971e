"""Calls that a publish makes to engines, beyond those of the fleet: one to each, at its own pace.

In: workers and what each is sent. Out: failures, as they come. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from palestra.server.types import EngineError, EngineRefused
from palestra.server.workers.types import Answers, Fleet, Worker

LOOK_S = 30.0
"""How long an engine may take to say what it is."""


def unwilling(answers: Answers) -> dict[str, EngineError]:
    """Workers that failed, and those that answered 200 with success false."""
    failed = dict(answers.failed)
    for url, answer in answers.ok.items():
        if answer.get("success") is False:
            failed[url] = EngineRefused(f"{url}: {answer.get('message', 'no reason given')}")
    return failed


class Spread:
    """One call to each worker, whose failures are seen as they come: a worker that hangs hides nobody else's."""

    def __init__(
        self, fleet: Fleet, calls: Mapping[str, tuple[Worker, Mapping[str, Any]]], path: str, timeout_s: float
    ):
        """`calls`: worker URL -> the worker and what it is sent."""
        self._tasks = {
            url: asyncio.create_task(fleet.ask([worker], path, payload, timeout_s=timeout_s))
            for url, (worker, payload) in calls.items()
        }
        self.failed: dict[str, EngineError] = {}
        """So far."""

    async def until_failure(self) -> dict[str, EngineError]:
        """Until all have answered, or the first one failed."""
        pending = set(self._tasks.values())
        while pending and not self.failed:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.failed.update(unwilling(task.result()))
        return self.failed

    async def rest(self, grace_s: float) -> dict[str, EngineError]:
        """All failures; who has not answered after `grace_s` more seconds is one."""
        await asyncio.wait(self._tasks.values(), timeout=grace_s)
        for url, task in self._tasks.items():
            if task.done():
                self.failed.update({u: e for u, e in unwilling(task.result()).items() if u not in self.failed})
            else:
                task.cancel()
                self.failed[url] = EngineError(f"{url} did not come back from a weight update that was given up")
        return self.failed
