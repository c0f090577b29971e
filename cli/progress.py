"""What a person sees while a run goes on: a line a step, who waits for whom, and a summary at the end.

In: the run's metrics and the service's status. Out: lines on the console.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra.cli.runfolder import read_metrics
from palestra.server.ledger import read_ledger

STATUS_EVERY_S = 15.0
"""On a console that is no terminal, how often the waiting is told."""


class Progress:
    """Follows one run."""

    def __init__(self, folder: Path, steps: int, console: Console) -> None:
        self.folder, self.steps, self.console = folder, steps, console
        self._shown = {entry["train_step"] for entry in read_metrics(folder)}
        self._status = console.status("starting") if console.is_terminal else None
        self._seen = -1
        """Size of the metrics file when it was read last."""
        self._told = ("", 0.0)
        self._last = time.monotonic()
        self._durations: list[float] = []

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, highlight=False)

    def waits(self, text: str) -> None:
        """What goes on now: the live line of a terminal; elsewhere a line now and then, where it changed."""
        if self._status is not None:
            self._status.update(text)
            return
        told, at = self._told
        if text != told and time.monotonic() - at > STATUS_EVERY_S:
            self._told = (text, time.monotonic())
            self.say(f"  ... {text}")

    def update(self) -> None:
        """Prints the steps that are new."""
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size == self._seen:
            return
        self._seen = size
        for entry in read_metrics(self.folder):
            if entry["train_step"] in self._shown:
                continue
            self._shown.add(entry["train_step"])
            now = time.monotonic()
            self._durations.append(now - self._last)
            self._last = now
            self.say(step_line(entry, self.steps, self._left(entry["train_step"])))

    def _left(self, step: int) -> float:
        recent = self._durations[-5:]
        return (self.steps - step) * sum(recent) / len(recent)


def step_line(entry: Mapping[str, Any], steps: int, left_s: float | None = None) -> str:
    """One step in one line."""

    def figure(name: str, form: str = ".3f") -> str:
        value = entry.get(name)
        return "-" if value is None else format(value, form)

    parts = [
        f"step {entry['train_step']:>3}/{steps}",
        f"reward {figure('reward/total/mean')}",
        f"valid calls {figure('env/valid_call/mean', '.2f')}",
        f"right answers {figure('env/right_answer/mean', '.2f')}",
        f"rollout {figure('rollout/tokens_per_s/mean', '.0f')} tok/s",
        f"train {figure('train/tokens_per_s', '.0f')} tok/s",
        f"|dlogp| {figure('train/abs_dlogp/max', '.1e')}",
    ]
    if left_s is not None:
        parts.append(f"left {int(left_s) // 60}:{int(left_s) % 60:02d}")
    return "  ".join(parts)


def summary(folder: Path, steps: int, console: Console, *, over: bool) -> None:
    """The first and last three steps, and the ledger. `over`: no more steps will come, so what is left untrained is discarded."""
    entries = read_metrics(folder)
    if entries:
        console.print()
        for entry in _ends(entries):
            console.print("  ..." if entry is None else step_line(entry, steps), highlight=False)
    ledger = read_ledger(folder / "store", run_over=over)
    table = Table(title="token ledger", title_justify="left", show_header=False, box=None)
    for line in ledger.lines():
        table.add_row(line)
    console.print()
    console.print(table)


def _ends(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    if len(entries) <= 6:
        return list(entries)
    return [*entries[:3], None, *entries[-3:]]
