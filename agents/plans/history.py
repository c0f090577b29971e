"""What came of each task so far: the memory of a curriculum. A line of JSON per group goes to disk, so that a resumed run goes on with it.

In: the rewards of complete groups. Out: means and counts by task. It waits for the disk.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One complete group of a task."""

    mean: float
    """Of its rewards."""
    best: float
    rollouts: int
    """Those with a reward."""


class History:
    """Results by task index, oldest first. Thread-safe; one process writes a file."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads what the file has; None: in memory alone."""
        self._path, self._lock = path, threading.Lock()
        self._results: dict[int, list[TaskResult]] = {}
        self._known: set[str] = set()
        if path is not None and path.exists():
            self._read(path)

    @property
    def groups(self) -> int:
        """Complete groups so far."""
        return len(self._known)

    def of(self, index: int) -> tuple[TaskResult, ...]:
        """The results of a task."""
        with self._lock:
            return tuple(self._results.get(index, ()))

    def mean(self, index: int, last: int | None = None) -> float | None:
        """Mean reward of a task's groups (of the `last` ones); None where none was played."""
        results = self.of(index)
        results = results if last is None else results[-last:]
        return math.fsum(result.mean for result in results) / len(results) if results else None

    def means(self, size: int, last: int | None = None) -> list[float | None]:
        """The same of tasks 0 to size - 1."""
        return [self.mean(index, last) for index in range(size)]

    def add(self, index: int, group_id: str, rewards: Sequence[float | None]) -> None:
        """A complete group; rollouts without a reward do not count, and a group that is known already is not counted again."""
        known = [reward for reward in rewards if reward is not None]
        if not known:
            return
        line = json.dumps({"task": index, "group": group_id, "rewards": known})
        with self._lock:
            if not self._keep(index, group_id, known):
                return
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")

    def _keep(self, index: int, group_id: str, rewards: Sequence[float]) -> bool:
        if group_id in self._known:
            return False
        self._known.add(group_id)
        result = TaskResult(math.fsum(rewards) / len(rewards), max(rewards), len(rewards))
        self._results.setdefault(index, []).append(result)
        return True

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:  # a line that a killed process did not end; the next one must not be glued to it
            logger.warning("%s: %d bytes of a broken last line are left out", path, len(raw) - len(whole))
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            said = json.loads(line)
            self._keep(int(said["task"]), said["group"], [float(reward) for reward in said["rewards"]])
