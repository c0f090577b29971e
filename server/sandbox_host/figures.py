"""What a sandbox host counts, and how Prometheus reads it. In: events and results. Out: text. Waits for nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from palestra.sandbox.box import read_result
from palestra.sandbox.types import BoxProtocolError

BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
"""Upper bounds of the histogram of run times, seconds."""
EVENTS = {
    "boxes_given_total": "Boxes that clients got",
    "queue_full_total": "Requests for a box that were refused because too many waited",
    "busy_total": "Requests for a box that got none in time",
    "expired_total": "Boxes destroyed because their client was not heard of",
    "lost_total": "Boxes that were lost while a client had them",
    "repeated_total": "Requests that came again and were answered without running anything",
    "infra_errors_total": "Requests that failed through no fault of the code",
}


class HostFigures:
    """Counters since the start."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0

    def ran(self, reply: dict[str, Any], seconds: float) -> None:
        """A run is over; `reply` is the agent's."""
        try:
            status: str = read_result(reply).status
        except ValueError:
            status = "refused"
        except BoxProtocolError:
            status = "session_lost"
        self._runs[status] += 1
        self._seconds += seconds
        self._buckets[next((at for at, most in enumerate(BUCKETS_S) if seconds <= most), len(BUCKETS_S))] += 1

    def text(self, gauges: Mapping[str, float], pool: Mapping[str, float]) -> str:
        """Prometheus's text format; `gauges` are the host's own."""
        lines: list[str] = []
        for name, value in gauges.items():
            _metric(lines, name, "gauge", "", {"": value})
        for name, about in EVENTS.items():
            _metric(lines, name, "counter", about, {"": self.events[name]})
        runs = {f'{{status="{status}"}}': float(count) for status, count in sorted(self._runs.items())}
        _metric(lines, "runs_total", "counter", "Runs of code by how they ended", runs)
        self._histogram(lines)
        for name, value in sorted(pool.items()):
            name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            _metric(lines, f"pool_{name}", "counter" if name.endswith("_total") else "gauge", "", {"": value})
        return "\n".join(lines) + "\n"

    def _histogram(self, lines: list[str]) -> None:
        name = "palestra_sandbox_run_seconds"
        lines += [f"# HELP {name} From a run's request to its answer", f"# TYPE {name} histogram"]
        total = 0
        for most, count in zip((*BUCKETS_S, "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{most}"}} {total}')
        lines += [f"{name}_sum {self._seconds:.6f}", f"{name}_count {total}"]


def _metric(lines: list[str], name: str, kind: str, about: str, values: Mapping[str, float]) -> None:
    name = f"palestra_sandbox_{name}"
    if about:
        lines.append(f"# HELP {name} {about}")
    lines.append(f"# TYPE {name} {kind}")
    lines += [f"{name}{label} {value}" for label, value in values.items()]
