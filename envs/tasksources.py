"""Tasks from wherever they lie: files (JSONL, Parquet), tables (a Hugging Face dataset or anything like it), sequences, and streams.

Records go in, Tasks come out; a record that cannot be used is named, and nothing is skipped. A stream is read as far as the task that is
asked for; nothing else is waited for. Parquet needs the extra `parquet`; the package `datasets` is never imported: an object of it will do.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, TypeAlias

from palestra.envs.tasks import TaskSource, read_tasks, task_from_json
from palestra.envs.types import Task, TaskError

ToTask: TypeAlias = Callable[[Any], Task]
"""A record of the user's, such as a dict of columns, as a task."""
WINDOW = 4096
"""Tasks that a stream remembers: as many groups may be under way before an earlier one is asked for again."""
FIELDS = ("prompt", "answer", "id", "meta")


class MappedTasks:
    """Records that can be counted and indexed, each made a task when it is asked for."""

    def __init__(self, records: Any, to_task: ToTask | None = None, *, name: str = "tasks") -> None:
        """`records`: with a length and an index. `to_task`: makes a task of one; None: records are tasks, or have a task's fields (see
        `record_task`). `name`: what errors call them.

        Raises:
            TaskError: there are none.
        """
        self._records, self._to_task, self._name = records, to_task, name
        if not len(records):
            raise TaskError(f"{name}: no tasks in it")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return _mapped(self._records[index], self._to_task, f"{self._name}:{index}")


class StreamedTasks:
    """Tasks of an iterator, endless or not: index n is the n-th that it yields, and one that ends is begun again, epoch after epoch.

    The factory must yield the same tasks every time: an index that is no longer remembered is found by beginning again. Thread-safe.
    """

    def __init__(
        self,
        factory: Callable[[], Iterable[Any]],
        to_task: ToTask | None = None,
        *,
        name: str = "tasks",
        window: int = WINDOW,
    ) -> None:
        """`factory`: called for a fresh iterator, such as a generator function. `to_task`: as in `MappedTasks`."""
        self._factory, self._to_task, self._name = factory, to_task, name
        self._lock = threading.Lock()
        self._recent: deque[Task] = deque(maxlen=window)
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        """Index of the task that the iterator yields next."""

    def __getitem__(self, index: int, /) -> Task:
        """Reads on until it is there.

        Raises:
            IndexError: it is negative.
            TaskError: a record is none, or the factory gives nothing that can be gone through.
        """
        if index < 0:
            raise IndexError(f"task {index} of a stream, which has no end")
        with self._lock:
            if index < self._next - len(self._recent):
                self._iterator, self._next = None, 0
                self._recent.clear()
            while self._next <= index:
                self._recent.append(self._read())
                self._next += 1
            return self._recent[index - self._next]

    def _read(self) -> Task:
        where = f"{self._name}:{self._next}"
        for fresh in (self._iterator is None, True):
            if fresh:
                self._iterator = self._begin()
            assert self._iterator is not None, "it was begun"
            try:
                record = next(self._iterator)
            except StopIteration:
                continue
            return _mapped(record, self._to_task, where)
        raise TaskError(f"{self._name}: the stream yields nothing")

    def _begin(self) -> Iterator[Any]:
        begun = self._factory()
        if not isinstance(begun, Iterable):
            raise TaskError(f"{self._name}: the function gives {type(begun).__name__}, which yields no tasks")
        return iter(begun)


def source_of(given: Any, to_task: ToTask | None = None, *, name: str = "tasks") -> TaskSource | StreamedTasks:
    """A source of tasks from what users have: a path, a dataset object, a sequence, a function that yields tasks, or any iterable that can
    be begun again. Sequences are counted; the others are streams.

    Raises:
        TaskError: none of these, or an iterator that could be gone through once only.
    """
    if isinstance(given, MappedTasks | StreamedTasks):
        return given
    if isinstance(given, str | Path):
        return read_any_tasks(given, to_task)
    if is_table(given) or (isinstance(given, Sequence) and not isinstance(given, bytes)):
        return MappedTasks(given, to_task, name=name)
    if isinstance(given, TaskSource) and not isinstance(given, Mapping):
        return given if to_task is None else MappedTasks(given, to_task, name=name)
    if isinstance(given, Iterator):
        raise TaskError(
            f"{name}: an iterator can be gone through once only; give the function that makes it, without calling it"
        )
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str | bytes):
        return StreamedTasks(lambda: given, to_task, name=name)
    if callable(given):
        return StreamedTasks(given, to_task, name=name)
    raise TaskError(
        f"{name}: no tasks can be read from {type(given).__name__}; give a sequence, a dataset, a path or a function that yields tasks"
    )


def is_table(value: Any) -> bool:
    """Whether it looks like a Hugging Face dataset: columns with names, a length, and rows by index."""
    return hasattr(value, "column_names") and hasattr(value, "__getitem__") and hasattr(value, "__len__")


def record_task(record: Mapping[str, Any], where: str) -> Task:
    """A task from a record with a task's fields: prompt (a text, or messages), answer, id, meta. Other fields are put into `meta`; a field
    that a message has empty, as tables do, is left out. An id that is missing is `where`.

    Raises:
        TaskError: says which record and what is wrong.
    """
    try:
        plain = {str(key): _plain(value, str(key)) for key, value in record.items()}
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    if "prompt" not in plain:
        raise TaskError(
            f"{where}: no field 'prompt'; it has {', '.join(plain) or 'none'} (give a function that makes a task of a record)"
        )
    if isinstance(prompt := plain["prompt"], list):
        plain["prompt"] = [_without_none(message) for message in prompt]
    meta = plain.pop("meta", None) or {}
    if not isinstance(meta, Mapping):
        raise TaskError(f"{where}: 'meta' must be an object, got {type(meta).__name__}")
    more = {key: plain.pop(key) for key in list(plain) if key not in FIELDS}
    if plain.get("id") in (None, ""):
        plain["id"] = where
    try:
        return task_from_json({**plain, "meta": {**meta, **more}})
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None


def read_any_tasks(path: str | Path, to_task: ToTask | None = None) -> tuple[Task, ...]:
    """The tasks of a file, by its ending: .parquet, else JSONL. `to_task`: makes a task of a row; None: rows have a task's fields.

    Raises:
        TaskError: the file cannot be read, is empty, holds an id twice, or a row of it is no task: says which.
    """
    path = Path(path)
    if path.suffix.lower() == ".parquet":
        return read_parquet_tasks(path, to_task)
    if to_task is None:
        return read_tasks(path)
    return _distinct(_read_records(path), to_task, path)


def read_parquet_tasks(path: str | Path, to_task: ToTask | None = None) -> tuple[Task, ...]:
    """The rows of a Parquet file as tasks: see `record_task`. A row's name is `FILE:ROW`, counted from 1 as lines are.

    Raises:
        TaskError: as `read_any_tasks`, or pyarrow is not installed.
    """
    path = Path(path)
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise TaskError(f"{path}: Parquet needs pyarrow ({error}): pip install 'palestra[parquet]'") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # what pyarrow raises for a broken file is a ValueError
        raise TaskError(f"{path}: cannot be read: {error}") from error
    return _distinct(enumerate(rows, 1), to_task, path)


def _read_records(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise TaskError(f"{path}:{number}: not valid JSON: {error}") from None


def _distinct(records: Iterable[tuple[int, Any]], to_task: ToTask | None, path: Path) -> tuple[Task, ...]:
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, record in records:
        task = _mapped(record, to_task, f"{path.name}:{number}")
        if (first := seen.setdefault(task.id, number)) != number:
            raise TaskError(f"{path}:{number}: id {task.id!r} was used in row {first} already")
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{path}: no tasks in it")
    return tuple(tasks)


def _mapped(record: Any, to_task: ToTask | None, where: str) -> Task:
    """One record as a task; one without an id is called by its place."""
    made: Any = record
    if to_task is not None:
        try:
            made = to_task(record)
        except Exception as error:
            raise TaskError(f"{where}: the function failed on this record: {type(error).__name__}: {error}") from error
    if isinstance(made, Mapping):
        return record_task(made, where)
    if not isinstance(made, Task):
        raise TaskError(f"{where}: a task is a Task or an object with its fields, got {type(made).__name__}")
    return made if made.id else Task(made.prompt, made.answer, where, made.meta)


def _plain(value: Any, column: str) -> Any:
    """A value of a table as JSON knows it: tasks travel between processes."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case datetime() | date() | time():
            return value.isoformat()
        case Mapping():
            return {str(key): _plain(item, column) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, column) for item in value]
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return _plain(value.tolist(), column)
    raise TaskError(f"field {column!r}: {type(value).__name__} cannot be part of a task")


def _without_none(value: Any) -> Any:
    """Tables give every message the fields of all others, as None."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None or key == "content"}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
