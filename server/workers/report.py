"""What the service says of its engines: metrics of a step, and a row of /status per worker.

In: the table, figures and counters. Out: numbers under `engine/...`, and rows. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.server.workers.figures import PrefixFigures
from palestra.server.workers.table import WorkerTable
from palestra.server.workers.watch import Watcher


class Report:
    """Reads the others; changes nothing but what was reported last."""

    def __init__(self, table: WorkerTable, figures: PrefixFigures, watcher: Watcher) -> None:
        self._table, self._figures, self._watcher = table, figures, watcher
        self._reported: dict[str, int] = {}

    def take(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Metrics since the last call; `counts`: totals since the start, reported as what was added."""
        totals = {**counts, "quarantines": self._table.quarantines}
        names = {worker.url: f"worker_{at}" for at, worker in enumerate(self._table.members())}
        found = {f"engine/{name}/count": float(n - self._reported.get(name, 0)) for name, n in totals.items()}
        self._reported = totals
        return {
            **found,
            "engine/workers/serving": float(len(self._table.serving())),
            **self._figures.take(names),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One per worker, in the order of `worker_0`, `worker_1` ... of the metrics; what is not known is null."""
        return [
            {
                "url": worker.url,
                "state": worker.state.value,
                "why": worker.why,
                "version": worker.version,
                "running": None if load is None else load.running,
                "waiting": None if load is None else load.waiting,
                "token_usage": None if load is None else load.token_usage,
                "prefix_hit": self._figures.worker(worker.url),
            }
            for worker in self._table.members()
            for load in [self._watcher.loads.get(worker.url)]
        ]
