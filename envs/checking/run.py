"""Runs the laws on one environment.

An id and arguments go in, a `Report` comes out: every law is tried, and what breaks one stops no other. Waits for the environment's own
tools, and for the processes of the laws that start some; each such wait has a deadline.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.envs.checking import actions, box, contract, grading, processes
from palestra.envs.checking.playing import Subject
from palestra.envs.checking.types import Broken, Outcome, Report, Untestable, Verdict
from palestra.envs.types import EnvError


@dataclass(frozen=True, slots=True)
class Law:
    """One thing that every environment keeps."""

    name: str
    attempt: Callable[[Subject], str]
    """Returns what was seen; raises `Broken` or `Untestable`."""

    @property
    def says(self) -> str:
        """What it asks, in a line."""
        return (inspect.getdoc(self.attempt) or "").partition("\n")[0].removesuffix(".")


LAWS: Mapping[str, Law] = {
    name: Law(name, attempt)
    for name, attempt in {
        "contract": contract.gymnasium_checks,
        "prompt": contract.prompts,
        "seeds": contract.seeds,
        "options": contract.options,
        "tasks": contract.tasks,
        "objects": contract.objects,
        "cost": contract.cost,
        "schemas": actions.schemas,
        "messages": actions.messages,
        "arguments": actions.arguments,
        "lengths": actions.lengths,
        "null": grading.null,
        "echo": grading.echo,
        "oracle": grading.oracle,
        "swapped": grading.swapped,
        "twice": grading.twice,
        "sums": grading.sums,
        "truncated": grading.truncated,
        "replayed": grading.replayed,
        "box": box.secrets,
        "vectors": contract.vectors,
        "close": processes.closing,
        "killed": processes.killed,
    }.items()
}
"""In the order in which they are tried."""
PROCESSES = frozenset({"vectors", "close", "killed"})
"""Laws that start processes: seconds each."""


def check(
    env_id: str,
    args: Mapping[str, Any] | None = None,
    *,
    tasks: int = 5,
    laws: Collection[str] | None = None,
    processes: bool = True,
) -> Report:
    """Tries the laws on an environment.

    Args:
        env_id: as in a run's configuration; `package.module:id` imports the module first.
        args: of the environment's constructor.
        tasks: how many of its tasks are tried, spread over all of them.
        laws: names of the laws to try; None: all.
        processes: False leaves out the laws that start processes.

    Raises:
        EnvError: it cannot be made, is no environment of messages, or has no tasks.
        ValueError: a law that does not exist.
    """
    chosen = list(LAWS) if laws is None else list(laws)
    if unknown := sorted(set(chosen) - LAWS.keys()):
        raise ValueError(f"no law is called {unknown[0]!r}; known: {', '.join(LAWS)}")
    started = time.monotonic()
    subject = Subject(env_id, dict(args or {}), tasks)
    try:
        ids, size = _look(subject)
        outcomes = [try_law(LAWS[name], subject) for name in chosen if processes or name not in PROCESSES]
        scores = grading.mean_scores(subject)
    finally:
        subject.close()
    return Report(env_id, subject.args, size, ids, tuple(outcomes), scores, time.monotonic() - started)


def try_law(law: Law, subject: Subject) -> Outcome:
    """What one law comes to."""
    if (reason := subject.excused(law.name)) is not None:
        return Outcome(law.name, law.says, Verdict.UNTESTED, f"excused: {reason}")
    try:
        return Outcome(law.name, law.says, Verdict.PASSED, law.attempt(subject))
    except Untestable as untestable:
        return Outcome(law.name, law.says, Verdict.UNTESTED, str(untestable))
    except Broken as broken:
        return Outcome(law.name, law.says, Verdict.FAILED, str(broken))
    except Exception as error:  # noqa: BLE001 - whatever user code raises, the other laws are tried
        return Outcome(law.name, law.says, Verdict.FAILED, f"{type(error).__name__}: {error}")


def _look(subject: Subject) -> tuple[tuple[str, ...], int]:
    """Ids of the tasks to try, and how many there are."""
    try:
        return tuple(task.id for task in subject.tasks), len(subject.inner.tasks)
    except Broken as broken:
        raise EnvError(f"environment {subject.env_id!r}: {broken}") from None
