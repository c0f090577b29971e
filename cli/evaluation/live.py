"""What a person sees while an evaluation goes on: one live line on a terminal, elsewhere a line every half minute.

A `Standing` goes in, text comes out on stderr, so that stdout holds the result alone. Nothing is waited for.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from palestra.agents.evaluation.run import Standing
from palestra.agents.evaluation.summary import quantile

PLAIN_EVERY_S = 30.0


class Live:
    """Follows one evaluation while the context is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._told_at = time.monotonic()
        self._note = ""

    def __enter__(self) -> Live:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, text: str) -> None:
        """Said at once, and kept in the live line."""
        self._note = text
        self._console.print(text, highlight=False, markup=False)

    def tick(self, standing: Standing) -> None:
        """Shows how it stands."""
        if self._status is not None:
            self._status.update(self._console.render_str(line(standing, self._note), markup=False, highlight=False))
        elif time.monotonic() - self._told_at >= PLAIN_EVERY_S:
            self._told_at = time.monotonic()
            self._console.print(line(standing), highlight=False, markup=False)


def line(standing: Standing, note: str = "") -> str:
    """One line."""
    parts = [f"{standing.finished}/{standing.planned} episodes", f"{standing.running} running"]
    if standing.errors:
        parts.append(f"{standing.errors} errors")
    if standing.mean is not None:
        parts.append(f"reward {standing.mean:.3f}")
    p50, p95 = quantile(standing.call_seconds, 0.5), quantile(standing.call_seconds, 0.95)
    if p50 is not None and p95 is not None:
        parts.append(f"calls {p50:.2f} s, p95 {p95:.2f} s")
    if standing.left_s is not None and standing.finished < standing.planned:
        parts.append(f"left {clock(standing.left_s)}")
    return "  ".join([*parts, note] if note else parts)


def clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
