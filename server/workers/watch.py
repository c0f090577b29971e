"""The watcher: one task that looks at every worker about once a second and keeps the fleet's table, and the router's list, true.

In: what workers and router answer. Out: quarantines, workers that come back with the weights in force, figures. A worker that hangs delays
nobody else: each is looked at by a task of its own, and every call is bounded. While weights are being updated the watcher keeps still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from palestra.server.engine_wire import version_of
from palestra.server.types import EngineError
from palestra.server.workers.figures import Load, PrefixFigures, read_counters, read_load
from palestra.server.workers.mend import Mender
from palestra.server.workers.router import changes
from palestra.server.workers.table import WorkerTable, out_of_reach
from palestra.server.workers.types import Worker, WorkerState

log = logging.getLogger(__name__)
PERIOD_S = 1.0
COUNTERS_S = 10.0
"""Between two readings of a worker's /metrics, a text of some size."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at a worker gave."""

    version: int | None
    """The policy version that it names; None where it names none."""
    error: EngineError | None = None


class Step(Enum):
    """What follows from a look."""

    NOTHING = "nothing"
    LOST = "lost"
    """It is out of reach."""
    WRONG = "wrong"
    """It has other weights than those in force."""
    MEND = "mend"
    """It answers again."""


def judge(worker: Worker, seen: Seen, wanted: int) -> tuple[Step, str]:
    """What to do with a worker, and why. `wanted`: the version in force."""
    quarantined = worker.state is WorkerState.QUARANTINED
    if seen.error is not None and (why := out_of_reach(seen.error)) is not None:
        return Step.NOTHING if quarantined else Step.LOST, why
    if seen.version is None:
        return Step.NOTHING, ""  # it lives, and says something that is none of ours: the next look may tell more
    if quarantined:
        return Step.MEND, ""
    if seen.version != wanted:
        return Step.WRONG, f"has version {seen.version}, not {wanted}"
    return Step.NOTHING, ""


class Watcher:
    """See the module. `loads` holds the newest reading of each worker."""

    def __init__(
        self,
        table: WorkerTable,
        figures: PrefixFigures,
        mender: Mender,
        displace: Callable[[], Awaitable[None]],
        period_s: float = PERIOD_S,
    ) -> None:
        """`displace` takes requests off workers that do not answer."""
        self._table, self._figures, self._mender, self._displace = table, figures, mender, displace
        self.period_s = period_s
        self.loads: dict[str, Load] = {}
        self._looks: dict[str, tuple[int, asyncio.Task[Seen]]] = {}
        self._counted: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, on the running loop."""
        self._task = asyncio.create_task(self._run(), name="worker-watch")
        self._task.add_done_callback(_say_why)

    async def close(self) -> None:
        """Ends, with all looks under way."""
        tasks = [task for _, task in self._looks.values()] + ([] if self._task is None else [self._task])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._mender.close()

    @property
    def room_elsewhere(self) -> bool:
        """Whether some of several serving workers has room."""
        serving = self._table.serving()
        return len(serving) > 1 and any((load := self.loads.get(w.url)) is not None and load.room for w in serving)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                await self.tick()
            except EngineError as error:
                log.warning("the watcher could not look after the workers: %s", error)
            await asyncio.sleep(max(self.period_s - (loop.time() - begun), 0.05))

    async def tick(self) -> None:
        """One round: at most a period, and what quarantines take."""
        table = self._table
        if table.updating:
            return
        for worker in table.members():
            if worker.url not in self._looks:
                self._looks[worker.url] = (table.era, asyncio.create_task(self._look(worker)))
        await self._reconcile()
        await asyncio.wait([task for _, task in self._looks.values()], timeout=self.period_s)
        steps = []
        for url, (era, task) in list(self._looks.items()):
            if task.done():
                del self._looks[url]
                # One that saw an update begin or end may have seen either weights.
                if era == table.era:
                    steps.append(self._act(table.member(url), task.result()))
        await asyncio.gather(*steps)
        if table.stranded and not table.updating:
            table.stranded = False
            await self._displace()

    async def _look(self, worker: Worker) -> Seen:
        url = worker.url
        try:
            info = await self._table.calls.get(f"{url}/model_info", self._table.alive_s)
        except EngineError as error:
            self.loads.pop(url, None)
            return Seen(None, error)
        try:
            version: int | None = version_of(info.get("weight_version", "default"))
        except EngineError as error:
            log.warning("worker %s: %s", url, error)
            version = None
        await self._measure(url)
        return Seen(version)

    async def _measure(self, url: str) -> None:
        """Load and counters, as far as the worker gives them: an engine without them is no worse an engine."""
        calls, alive_s, now = self._table.calls, self._table.alive_s, asyncio.get_running_loop().time()
        load = None
        try:
            load = read_load(await calls.get(f"{url}/v1/loads?include=core", alive_s))
        except (EngineError, ValueError, TypeError) as error:
            log.debug("worker %s: its load is not known: %s", url, error)
        if load is None:
            self.loads.pop(url, None)
        else:
            self.loads[url] = load
        if now - self._counted.get(url, -COUNTERS_S) < COUNTERS_S:
            return
        self._counted[url] = now
        try:
            if (total := read_counters(await calls.text(f"{url}/metrics", alive_s))) is not None:
                self._figures.counted(url, total)
        except (EngineError, ValueError) as error:
            log.debug("worker %s: its counters are not known: %s", url, error)

    async def _reconcile(self) -> None:
        """Makes the router's list that of the serving workers."""
        if self._table.router is None:
            return
        router, table = self._table.router, self._table
        try:
            listed = await router.workers()
            # Where nobody serves, one that was lost to a mere silence may stay: a request that waits for it beats one that is refused.
            kept = () if table.serving() else [w.url for w in table.members() if not table.tainted(w)]
            wrong = changes(listed, table.members(), kept)
            for url in wrong.newcomers:
                table.newcomer(url)
            for url in (*wrong.remove, *wrong.newcomers):
                await router.remove(url)
            for url in wrong.add:
                await router.add(url)
        except EngineError as error:
            log.warning("the router's list is not what it should be: %s", error)

    async def _act(self, worker: Worker, seen: Seen) -> None:
        table = self._table
        if table.wanted is None:
            return
        if seen.version is not None:
            worker.version = seen.version
        step, why = judge(worker, seen, table.wanted.version)
        if step in (Step.LOST, Step.WRONG):
            await table.quarantine(worker, why, heals=step is Step.LOST)
        elif step is Step.MEND:
            self._mender.mend(worker)


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the workers are watched no longer", exc_info=error)
