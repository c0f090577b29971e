"""Files and sources of tasks, and making environments by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from palestra.envs.config import EnvConfig
from palestra.envs.registry import load_env_class, make_env, open_tasks, register_builtin
from palestra.envs.tasks import GeneratedTasks, TaskSource, read_tasks, task_from_json, task_to_json, write_tasks
from palestra.envs.types import EnvError, Task, TaskError

ID = "palestra/Calculator-v0"


def file(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


class TestFiles:
    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        tasks = (
            Task("line\u2028separator\u0085next\x0cform\rfeed", {"n": 1}, "a", {"level": 2}),
            Task(({"role": "user", "content": "日本"}, {"role": "assistant", "content": "x"}), None, "b"),
        )
        path = tmp_path / "tasks.jsonl"
        write_tasks(path, tasks)
        assert read_tasks(path) == tasks
        assert path.read_bytes().count(b"\n") == 2

    def test_unescaped_separators_inside_a_text_do_not_end_a_record(self, tmp_path: Path) -> None:
        path = file(tmp_path, '{"prompt": "a\u2028b", "id": "x"}', "", '{"prompt": "c\u0085d"}')
        assert [task.prompt for task in read_tasks(path)] == ["a\u2028b", "c\u0085d"]
        assert [task.id for task in read_tasks(path)] == ["x", "tasks.jsonl:3"]

    def test_a_byte_order_mark_and_carriage_returns_are_read(self, tmp_path: Path) -> None:
        path = file(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r', b'{"prompt": "b"}\r')
        assert [task.prompt for task in read_tasks(path)] == ["a", "b"]

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ('{"prompt": "a"', ":2: column 15: not valid JSON: Expecting ',' delimiter"),
            ('{"prompt": "a"} {"prompt": "b"}', ":2: column 17: not valid JSON: Extra data"),
            ("[1]", ":2: a task is a JSON object, got list"),
            ('{"promt": "a"}', ":2: unknown key 'promt'"),
            ('{"answer": 1}', ":2: 'prompt' must be a text or a list of messages, got null"),
            ('{"prompt": []}', ":2: 'prompt' must be"),
            ('{"prompt": [{"role": "robot", "content": "x"}]}', ":2: 'prompt' must be"),
            ('{"prompt": "a", "meta": 1}', ":2: 'meta' must be an object, got int"),
            ('{"prompt": "a", "id": null}', ":2: 'id' must be a text, got NoneType"),
            ('{"prompt": "b", "id": "one"}', ":2: id 'one' was used on line 1 already"),
            (b'{"prompt": "\xff"}', ":2: byte 13 of the line is not UTF-8"),
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path: Path, line: str | bytes, says: str) -> None:
        path = file(tmp_path, '{"prompt": "a", "id": "one"}', line, '{"prompt": "c"}')
        with pytest.raises(TaskError) as caught:
            read_tasks(path)
        assert str(caught.value).startswith(str(path))
        assert says in str(caught.value)

    def test_missing_and_empty_files(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match=r"none\.jsonl: cannot be read: No such file"):
            read_tasks(tmp_path / "none.jsonl")
        with pytest.raises(TaskError, match="no tasks"):
            read_tasks(file(tmp_path, "", " "))

    def test_json_round_trip(self) -> None:
        task = make_env(ID).unwrapped.tasks[3]  # type: ignore[attr-defined]
        assert task_from_json(json.loads(json.dumps(task_to_json(task)))) == task


class TestSources:
    def test_generated(self) -> None:
        source = GeneratedTasks(3, lambda index: Task(str(index), id=str(index)))
        assert isinstance(source, TaskSource)
        assert [task.id for task in source] == ["0", "1", "2"]  # type: ignore[attr-defined]  # iterates by index
        with pytest.raises(IndexError):
            source[3]
        with pytest.raises(ValueError, match="size"):
            GeneratedTasks(0, lambda index: Task(str(index)))

    def test_of_a_run(self, tmp_path: Path) -> None:
        assert len(open_tasks(ID, {"size": 10})) == 10
        path = file(tmp_path, '{"prompt": "What is 1 plus 1?", "answer": 2}')
        tasks = open_tasks(ID, {}, str(path))
        assert len(tasks) == 1
        env = make_env(ID, {}, tasks)
        assert env.reset(seed=0)[1]["step"].task_id == "tasks.jsonl:1"
        with pytest.raises(EnvError, match="no tasks of its own"):
            open_tasks("CartPole-v1")


class TestNames:
    def test_a_wrong_id_is_told_the_nearest(self) -> None:
        with pytest.raises(EnvError, match=r"did you mean 'palestra/Calculator-v0'\?"):
            make_env("palestra/Calculater-v0")
        with pytest.raises(EnvError, match=r"package\.module:Name-v0"):
            load_env_class("zzz")

    def test_a_module_is_imported_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (
            "from palestra.envs.core import MessageEnv\nfrom palestra.envs.registry import register\n"
            "from palestra.envs.types import Task\n\n@register('mine/Own-v0', max_episode_steps=3)\n"
            "class Own(MessageEnv):\n    tasks = (Task('hi', id='t'),)\n"
        )
        (tmp_path / "my_own_env.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert load_env_class("my_own_env:mine/Own-v0").__name__ == "Own"
        env: Any = gym.make("my_own_env:mine/Own-v0")
        assert "ScoreTruncated<TimeLimit" in repr(env)
        with pytest.raises(EnvError, match="module 'not_there' cannot be imported"):
            make_env("not_there:mine/Own-v0")

    def test_wrong_arguments_are_named(self) -> None:
        with pytest.raises(EnvError, match="level"):
            make_env(ID, {"level": 1})
        with pytest.raises(EnvError, match="levels must be some of"):
            make_env(ID, {"levels": [9]})

    @pytest.mark.filterwarnings("error")
    def test_registering_a_builtin_twice_changes_nothing(self) -> None:
        register_builtin(ID, "palestra.envs.calculator:Calculator")
        assert load_env_class(ID).__name__ == "Calculator"


def test_the_section_refuses_unknown_keys() -> None:
    assert EnvConfig(id=ID).concurrency == 64
    with pytest.raises(ValueError, match="Extra inputs"):
        EnvConfig.model_validate({"id": ID, "ide": 1})


def test_importing_the_words_loads_nothing_heavy() -> None:
    code = (
        "import sys, palestra.envs.types, palestra.agents.types, palestra.agents.config\n"
        "heavy = {'torch', 'transformers', 'megatron', 'openai', 'aiohttp', 'fastapi', 'httpx2', 'docstring_parser',"
        " 'palestra.envs.calculator'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
