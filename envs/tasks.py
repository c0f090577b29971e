"""Where tasks come from: anything with a length and an index. Files of tasks, and sources that make them.

A JSONL file goes in, Tasks come out; a line that cannot be used is named, and nothing is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from palestra.envs.spaces import is_message
from palestra.envs.types import Task, TaskError

KEYS = frozenset({"prompt", "answer", "id", "meta"})


@runtime_checkable
class TaskSource(Protocol):
    """Indexable tasks; the same index always gives an equal task."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


class GeneratedTasks:
    """Tasks that are made when asked for: `make(index)` must depend on the index alone."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        if size < 1:
            raise ValueError(f"a source of tasks needs a size of at least 1, got {size}")
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._make(index)


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """Reads a JSONL file: {"prompt", "answer", "id", "meta"} a line; an id that is left out is `FILE:LINE`.

    Records end at a line feed and at nothing else: U+2028 or a form feed inside a text is part of it.

    Raises:
        TaskError: the file is missing, empty or not UTF-8, or a line is broken: says which, at which column, and what
            is wrong.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _read_line(line, path, number)
        if (first := seen.setdefault(task.id, number)) != number:
            raise TaskError(f"{path}:{number}: id {task.id!r} was used on line {first} already")
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{path}: no tasks in it")
    return tuple(tasks)


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Writes what `read_tasks` reads."""
    lines = [json.dumps(task_to_json(task), ensure_ascii=False) + "\n" for task in tasks]
    Path(path).write_bytes("".join(lines).encode())


def task_to_json(task: Task) -> dict[str, Any]:
    """The task as a JSON object."""
    prompt = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
    return {"prompt": prompt, "answer": task.answer, "id": task.id, "meta": dict(task.meta)}


def task_from_json(value: Any) -> Task:
    """The task that `task_to_json` wrote.

    Raises:
        TaskError: says which key is wrong.
    """
    if not isinstance(value, dict):
        raise TaskError(f"a task is a JSON object, got {type(value).__name__}")
    if unknown := sorted(value.keys() - KEYS):
        raise TaskError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(KEYS))}")
    prompt = _prompt(value.get("prompt"))
    identity, meta = value.get("id", ""), value.get("meta", {})
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise TaskError(f"'id' must be a text, got {type(identity).__name__}")
    if not isinstance(meta, dict):
        raise TaskError(f"'meta' must be an object, got {type(meta).__name__}")
    return Task(prompt, value.get("answer"), str(identity), meta)


def _prompt(prompt: Any) -> str | tuple[dict[str, Any], ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(is_message(message) for message in prompt):
        return tuple(prompt)
    raise TaskError(f"'prompt' must be a text or a list of messages, got {json.dumps(prompt, ensure_ascii=False)[:80]}")


def _read_line(line: bytes, path: Path, number: int) -> Task:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        task = task_from_json(value)
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}:{number}: byte {error.start + 1} of the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}:{number}: column {error.colno}: not valid JSON: {error.msg}") from None
    except (TaskError, RecursionError, ValueError) as error:
        raise TaskError(f"{path}:{number}: {error}") from None
    return task if task.id else Task(task.prompt, task.answer, f"{path.name}:{number}", task.meta)
