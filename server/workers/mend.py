"""How a quarantined worker comes back: it gets the weights in force where it has others, proves that it is fit, and is admitted.

In: a worker that answers. Out: a worker that serves, or a line that says why not, and another attempt later. It waits for the worker, a
bounded time; an update of all weights that begins meanwhile has precedence, and what was done is not relied upon then.
"""

from __future__ import annotations

import asyncio
import logging

from palestra.server.engine_wire import version_of
from palestra.server.types import EngineError
from palestra.server.workers.probe import ModelFacts, probe_worker
from palestra.server.workers.table import WorkerTable
from palestra.server.workers.types import Weights, Worker

log = logging.getLogger(__name__)
FIRST_S = 2.0
MOST_S = 60.0
"""Between two attempts at one worker."""


class Mender:
    """At most one attempt per worker at a time, in a task of its own."""

    def __init__(self, table: WorkerTable, load_s: float) -> None:
        """`load_s`: how long a worker may take to load weights, seconds."""
        self._table, self._load_s = table, load_s
        self.facts: ModelFacts | None = None
        """What a worker is held to; None: nothing but its version."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._delays: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def mend(self, worker: Worker) -> None:
        """Begins an attempt, unless one goes on or the last one was just now."""
        now = asyncio.get_running_loop().time()
        task = self._tasks.get(worker.url)
        if (task is None or task.done()) and now >= self._not_before.get(worker.url, 0.0):
            self._tasks[worker.url] = asyncio.create_task(self._attempt(worker))

    async def close(self) -> None:
        """Ends all attempts."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _attempt(self, worker: Worker) -> None:
        table = self._table
        weights, era = table.wanted, table.era
        assert weights is not None, "a worker is mended once it is known which weights it must have"
        try:
            if not await self._bring_up(worker, weights, era):
                return
        except EngineError as error:
            delay = self._delays.get(worker.url, FIRST_S)
            self._delays[worker.url] = min(delay * 2, MOST_S)
            self._not_before[worker.url] = asyncio.get_running_loop().time() + delay
            worker.why = f"cannot serve again: {error}"
            log.warning("worker %s %s", worker.url, worker.why)
            return
        if table.era == era:
            self._delays.pop(worker.url, None)
            await table.admit(worker, weights.version)

    async def _bring_up(self, worker: Worker, weights: Weights, era: int) -> bool:
        """Whether the worker has the weights in force now, and is fit. False where only the next publish can bring them, or one has begun.

        Raises:
            EngineError: it failed on the way.
        """
        if await self._version(worker) != weights.version or self._table.tainted(worker):
            if (folder := await self._folder(worker, weights)) is None:
                return False
            await self._load(worker, weights, folder)
        if self._table.era != era:
            return False  # whoever updates the weights holds it now, and says when it goes on
        # It may have slept through the end of an update.
        await self._tell(worker, "/continue_generation", {})
        await self._table.learn_ranks(worker, self._table.alive_s)
        if self.facts is not None:
            await probe_worker(worker.url, self._table.calls, self.facts)
        return True

    async def _folder(self, worker: Worker, weights: Weights) -> str | None:
        """Where the worker can read the weights; None where it cannot."""
        if weights.shared is None or worker.agent is None:
            return weights.folder
        wanted = {"version": weights.version, "shared": weights.shared}
        pulled = await self._table.calls.post(f"{worker.agent}/pull", wanted, self._load_s)
        return str(pulled["path"]) if "path" in pulled else None

    async def _load(self, worker: Worker, weights: Weights, folder: str) -> None:
        await self._tell(worker, "/abort_request", {"abort_all": True})
        update = {"model_path": folder, "weight_version": str(weights.version), "flush_cache": True}
        await self._table.calls.post(f"{worker.url}/update_weights_from_disk", update, self._load_s)
        if (found := await self._version(worker)) != weights.version:
            raise EngineError(f"it has version {found} after loading {weights.version} from {folder}")

    async def _version(self, worker: Worker) -> int:
        info = await self._table.calls.get(f"{worker.url}/model_info", self._table.alive_s)
        return version_of(info.get("weight_version", "default"))

    async def _tell(self, worker: Worker, path: str, payload: dict[str, object]) -> None:
        await self._table.calls.post(worker.url + path, payload, self._table.alive_s)
