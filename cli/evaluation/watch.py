"""The supervisor's side of evaluations: an evaluator that ends is started again or given up, and what is done is told.

The run's desk and the evaluator's process go in; words for the console come out. It never ends a run: without an evaluator a run trains
all the same. Nothing here waits; `over` says when a run whose trainer has ended need not wait any longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palestra.agents.evaluation.config import EvalConfig
from palestra.cli.launch.types import RoleProcess
from palestra.server.evaluating.desk import EvalDesk
from palestra.server.evaluating.types import Done, EvalState, EvaluatingError

RESTARTS = 2
"""How often an evaluator that ended is started again, in a run."""


class EvalWatch:
    """Follows the evaluations of one run."""

    def __init__(
        self,
        folder: Path,
        section: EvalConfig,
        label: str,
        launch: Callable[[], RoleProcess],
        say: Callable[[str], None],
    ) -> None:
        """`label`: NAME of the metrics. `launch` starts the role; from the main thread, see `Crew.launch`."""
        self._desk, self._section, self._label = EvalDesk(folder), section, label
        self._launch, self._say = launch, say
        self._role: RoleProcess | None = None
        self._restarts, self._given_up = 0, ""
        self._size, self._told = -1, len(self._desk.outcomes())
        self._deadline: float | None = None

    @property
    def role(self) -> RoleProcess | None:
        """The evaluator's process; None before `start` and after it was given up."""
        return self._role

    def start(self) -> None:
        """Starts the evaluator. It is not waited for: nothing of the training needs it."""
        self._role = self._launch()

    def look(self) -> None:
        """Called now and then: starts an evaluator again that ended, and tells what was done since the last look."""
        if self._role is not None and (status := self._role.poll()) is not None:
            self._ended(status)
        if self._given_up:
            self._fail_all()
        size = self._desk.lines.stat().st_size if self._desk.lines.exists() else 0
        if size == self._size:
            return
        self._size = size
        lines = self._desk.outcomes()
        for line in lines[self._told :]:
            self._say(outcome_line(line, self._label))
        self._told = len(lines)

    def over(self) -> bool:
        """For a run whose trainer has ended: whether nothing is due any more, or it has waited long enough for what is."""
        try:
            waiting = self._desk.pending()
        except EvaluatingError as error:
            self._say(f"evaluations: {error}")
            return True
        if not waiting or self._role is None:
            return True
        now = time.monotonic()
        if self._deadline is None:
            # Each ends by itself at its deadline; beside that it takes the start of an engine.
            self._deadline = now + len(waiting) * (self._section.deadline_s + 60.0)
        if now > self._deadline:
            self._say(f"evaluations of {len(waiting)} steps are left: --resume goes on with them")
            return True
        return False

    def waits(self) -> str:
        """Who is waited for, after the trainer has ended."""
        return f"waits for the evaluation of step {', '.join(str(due.step) for due in self._desk.pending())}"

    def _ended(self, status: int) -> None:
        assert self._role is not None, "only of one that was started"
        words = self._role.last_words().splitlines()
        told = f"the evaluator ended (status {status}{': ' + words[-1] if words else ''})"
        if self._restarts < RESTARTS:
            self._restarts += 1
            self._say(f"{told}; it is started again ({self._restarts} of {RESTARTS}), the training goes on")
            self._role = self._launch()
            return
        self._say(f"{told} for the last time: nothing is evaluated any more, the training goes on")
        self._role, self._given_up = None, told

    def _fail_all(self) -> None:
        """Puts down as failed what is due and what becomes due, so that no publish waits for an evaluator that is not there."""
        try:
            for due in self._desk.pending():
                done = Done(due.step, due.version, due.on, EvalState.FAILED, time.time(), self._given_up)
                self._desk.finish(done)
        except EvaluatingError as error:
            self._say(f"evaluations: {error}")


def outcome_line(line: Mapping[str, Any], label: str) -> str:
    """One evaluation in one line."""
    head = f"eval step {line.get('eval/train_step')} (version {line.get('eval/version')})"

    def figure(name: str, form: str = ".3f") -> str:
        value = line.get(f"eval/{label}/{name}")
        return "-" if value is None else format(value, form)

    if f"eval/{label}/mean" not in line:
        return f"{head} {line.get('state')}: {line.get('reason')}"
    parts = [
        f"{head} {label} {figure('mean')} +- {figure('stderr')}",
        f"pass@{figure('k', '.0f')} {figure('pass_at_k')}",
        f"scored {figure('scored', '.0f')}",
    ]
    parts += [
        f"{name} {figure(name, '.0f')}" for name in ("errors", "void", "owed") if line.get(f"eval/{label}/{name}")
    ]
    if line.get("state") != EvalState.DONE:
        parts.append(f"{line.get('state')}: {line.get('reason')}")
    return "  ".join(parts)
