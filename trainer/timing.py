"""Where the wall time of train steps goes.

In: the parts of a step as they begin and end. Out: seconds by part, and what follows from them. A lap begins where the one before ended, so
the laps of a run add up to its time. Nothing is waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class StepClock:
    """The parts of the present lap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._parts: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what happens inside as `name`, added to what the lap has of it already."""
        began = self._clock()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + self._clock() - began

    def lap(self, trained_tokens: float) -> dict[str, float]:
        """Ends the lap and gives its metrics: `time/PART_s` for claim, train, save, publish and whatever else there was, `time/step_s` for
        all of it, the share that the trainer waited for groups, and trained tokens by second of the whole."""
        now = self._clock()
        whole, parts = now - self._began, self._parts
        self._began, self._parts = now, {}
        seconds = {name: parts.get(name, 0.0) for name in ("claim", "train", "save", "publish", *parts)}
        return {
            **{f"time/{name}_s": value for name, value in seconds.items()},
            "time/step_s": whole,
            "bubble/trainer/share": seconds["claim"] / whole if whole > 0 else 0.0,
            "train/trained_tokens_per_s/mean": trained_tokens / whole if whole > 0 else 0.0,
        }

    def skip(self) -> None:
        """Begins a lap anew: what was before belongs to no step."""
        self._began, self._parts = self._clock(), {}
