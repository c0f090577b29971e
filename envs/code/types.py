"""Words of the code environments: a problem, its cases, and how a task tells them. Waits for nothing.

A task of one's own (a line of `env.tasks`) has `meta = {"kind", "entry", "examples", "cases"}`; a case is `[arguments, value]` of a
function, `[input, output]` of a program. `answer` may hold a solution, for checks alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from palestra.envs.types import Task, TaskError

Kind = Literal["function", "program"]
KINDS = ("function", "program")
WORK = "solution.py"
"""The file that is graded, in the box's home."""


@dataclass(frozen=True, slots=True)
class Case:
    """What the work is given, and what it should give back."""

    given: Any
    """Of a function: the list of its arguments. Of a program: its whole input, a text."""
    expected: Any
    """Of a function: its value, plain JSON. Of a program: its whole output, a text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What has to be written, and how it is told right from wrong."""

    kind: Kind
    entry: str
    """The function's name; "" of a program."""
    examples: tuple[Case, ...]
    """Cases that the policy may see and try."""
    cases: tuple[Case, ...]
    """Cases that decide. They are never shown and never enter a box but as arguments or input."""


def problem_of(task: Task) -> Problem:
    """The problem that a task tells.

    Raises:
        TaskError: it tells none; says which key is wrong.
    """
    meta = task.meta
    kind, entry = meta.get("kind", "function"), meta.get("entry", "")
    if kind not in KINDS:
        raise TaskError(f"task {task.id!r}: meta.kind is {kind!r}; known: {', '.join(KINDS)}")
    if kind == "function" and not (isinstance(entry, str) and entry.isidentifier()):
        raise TaskError(f"task {task.id!r}: meta.entry must be the function's name, got {entry!r}")
    cases = _cases(task, "cases", kind)
    if not cases:
        raise TaskError(f"task {task.id!r}: meta.cases is empty: there is nothing that could fail")
    return Problem(kind, str(entry), _cases(task, "examples", kind), cases)


def _cases(task: Task, key: str, kind: Kind) -> tuple[Case, ...]:
    rows = task.meta.get(key, [])
    wanted = "a list of [arguments, value]" if kind == "function" else "a list of [input, output], both texts"
    if not isinstance(rows, list | tuple):
        raise TaskError(f"task {task.id!r}: meta.{key} must be {wanted}, got {type(rows).__name__}")
    for row in rows:
        pair = isinstance(row, list | tuple) and len(row) == 2
        if not pair or not (isinstance(row[0], list | tuple) if kind == "function" else _texts(row)):
            raise TaskError(f"task {task.id!r}: meta.{key} must be {wanted}, got {str(row)[:80]!r} in it")
    return tuple(Case(*row) for row in rows)


def _texts(row: Any) -> bool:
    return all(isinstance(part, str) for part in row)
