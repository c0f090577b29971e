"""Tasks from files, tables, sequences and streams: what is read, and what is said of a record that is no task."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.envs.tasks import TaskSource, write_tasks
from palestra.envs.tasksources import MappedTasks, StreamedTasks, read_any_tasks, record_task, source_of
from palestra.envs.types import Task, TaskError


class Dataset:
    """What a Hugging Face dataset looks like from here."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.read = columns, []

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {name: values[index] for name, values in self.columns.items()}


def question(record: dict[str, Any]) -> Task:
    return Task(record["question"], record["answer"])


class TestTables:
    def test_rows_are_made_tasks_when_they_are_asked_for_and_called_by_their_place(self) -> None:
        table = Dataset({"question": ["a", "b", "c"], "answer": [1, 2, 3]})
        tasks = source_of(table, question, name="gsm")
        assert isinstance(tasks, TaskSource)
        assert (len(tasks), table.read) == (3, [])
        assert tasks[2] == Task("c", 3, "gsm:2")
        assert table.read == [2]

    def test_without_a_function_the_columns_are_a_tasks_fields_and_the_rest_is_meta(self) -> None:
        table = Dataset({"prompt": ["a"], "answer": [np.int64(4)], "level": [np.array([1, 2])], "id": [7]})
        assert source_of(table)[0] == Task("a", 4, "7", {"level": [1, 2]})

    def test_messages_lose_the_fields_that_a_table_gives_all_of_them(self) -> None:
        messages = [
            {"role": "user", "content": "x", "tool_calls": None, "name": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f"}, "extra": None}],
            },
        ]
        task = record_task({"prompt": messages}, "here")
        assert task.prompt == (
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        )

    @pytest.mark.parametrize(
        ("record", "says"),
        [
            ({"question": "a"}, "here: no field 'prompt'; it has question"),
            ({"prompt": 3}, "here: 'prompt' must be a text"),
            ({"prompt": "a", "meta": 3}, "here: 'meta' must be an object, got int"),
            ({"prompt": "a", "image": object()}, "here: field 'image': object cannot be part of a task"),
        ],
    )
    def test_a_record_that_is_none_is_named(self, record: dict[str, Any], says: str) -> None:
        with pytest.raises(TaskError, match=says):
            record_task(record, "here")

    def test_a_function_that_fails_or_gives_no_task_names_its_record(self) -> None:
        tasks = MappedTasks([{"question": "a", "answer": 1}, {"answer": 1}], question, name="data")
        with pytest.raises(TaskError, match=r"data:1: the function failed on this record: KeyError: 'question'"):
            tasks[1]
        with pytest.raises(TaskError, match=r"data:0: a task is a Task or an object with its fields, got int"):
            MappedTasks([1], lambda record: record, name="data")[0]

    def test_no_records_are_no_source_and_indices_end(self) -> None:
        with pytest.raises(TaskError, match="no tasks in it"):
            source_of([])
        tasks = source_of([Task("a"), {"prompt": "b"}])
        assert [task.id for task in (tasks[0], tasks[1])] == ["tasks:0", "tasks:1"]
        for index in (-1, 2):
            with pytest.raises(IndexError):
                tasks[index]


class TestFiles:
    @pytest.fixture
    def parquet(self, tmp_path: Path) -> Path:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = {
            "prompt": [
                [{"role": "user", "content": "a", "name": None}],
                [{"role": "user", "content": "b", "name": "x"}],
            ],
            "answer": [1, 2],
            "day": [date(2026, 1, 1), None],
        }
        path = tmp_path / "tasks.parquet"
        parquet.write_table(pyarrow.table(rows), path)
        return path

    def test_parquet_rows_are_tasks(self, parquet: Path) -> None:
        first, second = read_any_tasks(parquet)
        assert first == Task(({"role": "user", "content": "a"},), 1, "tasks.parquet:1", {"day": "2026-01-01"})
        assert second.prompt == ({"role": "user", "content": "b", "name": "x"},)
        json.dumps([dict(task.meta) for task in (first, second)])

    def test_parquet_rows_through_a_function(self, parquet: Path) -> None:
        tasks = read_any_tasks(
            parquet, lambda row: Task(row["prompt"][0]["content"], row["answer"], f"n{row['answer']}")
        )
        assert [(task.prompt, task.id) for task in tasks] == [("a", "n1"), ("b", "n2")]
        with pytest.raises(TaskError, match=r"tasks\.parquet:2: id 'same' was used in row 1 already"):
            read_any_tasks(parquet, lambda row: Task("x", id="same"))

    def test_jsonl_is_read_by_its_own_reader_or_through_a_function(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        write_tasks(path, [Task("a", 1, "one"), Task("b", 2, "two")])
        assert [task.id for task in read_any_tasks(path)] == ["one", "two"]
        path.write_text('{"question": "q", "answer": 5}\n\n{"question": "r", "answer": 6}\n')
        assert read_any_tasks(path, question) == (Task("q", 5, "x.jsonl:1"), Task("r", 6, "x.jsonl:3"))
        with pytest.raises(TaskError, match=r"x\.jsonl:1: unknown key"):
            read_any_tasks(path)

    @pytest.mark.parametrize("name", ["none.parquet", "broken.parquet", "none.jsonl"])
    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        if name.startswith("broken"):
            path.write_bytes(b"PAR1 not really")
        with pytest.raises(TaskError, match=f"{name}: cannot be read"):
            read_any_tasks(path)


def count() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield {"prompt": str(number)}


class TestStreams:
    def test_index_n_is_the_nth_that_is_yielded_and_nothing_more_is_read(self) -> None:
        read: list[int] = []

        def numbers() -> Iterator[Task]:
            for number in itertools.count():
                read.append(number)
                yield Task(str(number))

        tasks = source_of(numbers, name="stream")
        assert isinstance(tasks, StreamedTasks)
        assert (tasks[3].prompt, tasks[3].id, tasks[1].prompt) == ("3", "stream:3", "1")
        assert read == [0, 1, 2, 3]

    def test_an_earlier_one_that_is_forgotten_is_found_by_beginning_again(self) -> None:
        begun: list[int] = []

        def counted() -> Iterator[dict[str, Any]]:
            begun.append(1)
            return count()

        tasks = StreamedTasks(counted, window=4)
        assert [tasks[index].prompt for index in (9, 6, 5, 9)] == ["9", "6", "5", "9"]
        assert len(begun) == 2

    def test_a_stream_that_ends_is_begun_again_epoch_after_epoch(self) -> None:
        tasks = source_of(lambda: ({"prompt": letter} for letter in "abc"))
        assert [tasks[index].prompt for index in range(7)] == list("abcabca")

    def test_one_that_yields_nothing_is_an_error_and_not_an_endless_wait(self) -> None:
        with pytest.raises(TaskError, match="the stream yields nothing"):
            source_of(lambda: iter(()))[0]
        with pytest.raises(TaskError, match="the function gives int"):
            source_of(lambda: 3)[0]

    def test_threads_get_the_same_tasks(self) -> None:
        tasks, got = StreamedTasks(count, window=8), dict[int, set[str]]()
        lock = threading.Lock()

        def read(order: list[int]) -> None:
            for index in order:
                task = tasks[index]
                with lock:
                    got.setdefault(index, set()).add(task.prompt if isinstance(task.prompt, str) else "")

        orders = [list(range(40)), list(range(39, -1, -1)), [0, 39, 1, 38] * 5]
        threads = [threading.Thread(target=read, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert got == {index: {str(index)} for index in range(40)}

    def test_what_can_be_gone_through_once_only_is_refused(self) -> None:
        with pytest.raises(TaskError, match="an iterator can be gone through once only"):
            source_of(count())
        with pytest.raises(TaskError, match="no tasks can be read from int"):
            source_of(3)
