"""The folder of an evaluation: what survives a kill, who may write, what a resumed one may change."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.evaluation.folder import open_folder
from palestra.agents.evaluation.plan import differences, draw, env_seed, model_seed, plan_tasks, task_hash
from palestra.agents.evaluation.provenance import git_state, provenance
from palestra.agents.evaluation.records import (
    EPISODES,
    RowLog,
    encode_row,
    latest,
    owed,
    read_header,
    read_rows,
)
from palestra.agents.evaluation.types import EvalError, EvalSpec, Row
from palestra.envs.calculator import arithmetic_tasks
from palestra.envs.tasks import task_from_json, task_to_json
from palestra.envs.types import EnvError, Reward, Task, TaskError
from tests.evals import CALCULATOR, header_of, row_of

STRANGE = "\u2028 \u0085 \x0b \x0c \r\n \ud800 <b> \U0001f600 \x00"


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    """Records end at a line feed and at nothing else."""
    rows = [
        row_of(
            "t0", 0, 0.5, components={"a": 1.0}, messages=({"role": "user", "content": "\u2028\u0085\x0b\x0c\r\n"},)
        ),
        row_of("t0", 1, None),
        row_of("t1", 0, 1.0, answer={"list": [1, 2.5, None, "x"]}, messages=({"role": "assistant", "content": None},)),
    ]
    with RowLog(tmp_path) as log:
        for row in rows:
            log.append(row)
    assert read_rows(tmp_path) == rows
    assert (tmp_path / EPISODES).read_bytes().count(b"\n") == 3


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize("answer", [STRANGE, 10**40, -(2**70), {1: {"x"}}, Odd(), math.inf, b"bytes"])
def test_what_json_cannot_hold_is_replaced_and_costs_no_episode(tmp_path: Path, answer: Any) -> None:
    row = row_of("t", 0, 1.0, answer=answer, messages=({"role": "user", "content": STRANGE, "extra": Odd()},))
    with RowLog(tmp_path) as log:
        log.append(replace(row, reward=Reward(1.0, {"good": 1.0, "bad": math.nan}, STRANGE)))
    (back,) = read_rows(tmp_path)
    assert back.reward.value == 1.0
    assert back.reward.components == {"good": 1.0}
    assert "bad is nan" in back.reward.note
    assert back.messages[0]["content"] == STRANGE.replace("\ud800", "?")


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    whole = [row_of("t0", 0, 1.0), row_of("t1", 0, 0.0)]
    with RowLog(tmp_path) as log:
        for row in whole:
            log.append(row)
    path = tmp_path / EPISODES
    size, line = path.stat().st_size, encode_row(row_of("t2", 0, 1.0)) + b"\n"
    for cut in (1, len(line) // 2, len(line) - 1):
        os.truncate(path, size)
        with path.open("ab") as stream:
            stream.write(line[:cut])
        assert read_rows(tmp_path) == whole
        with RowLog(tmp_path) as log:
            log.append(row_of("t2", 0, 1.0))
        assert read_rows(tmp_path) == [*whole, row_of("t2", 0, 1.0)]


def test_a_torn_line_longer_than_a_block_is_found(tmp_path: Path) -> None:
    (tmp_path / EPISODES).write_bytes(encode_row(row_of("t0", 0, 1.0)) + b"\n" + b"x" * 200_000)
    RowLog(tmp_path).close()
    assert read_rows(tmp_path) == [row_of("t0", 0, 1.0)]
    (tmp_path / EPISODES).write_bytes(b"x" * 200_000)
    RowLog(tmp_path).close()
    assert (tmp_path / EPISODES).read_bytes() == b""


def test_a_whole_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / EPISODES).write_bytes(encode_row(row_of("t0", 0, 1.0)) + b"\n{}\n")
    with pytest.raises(EvalError, match=r"episodes\.jsonl:2: is no episode"):
        read_rows(tmp_path)


def test_a_second_writer_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom palestra.agents.evaluation.records import RowLog\n"
        "log = RowLog(Path(sys.argv[1]))\nprint('holds', flush=True)\nsys.stdin.read()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        with pytest.raises(EvalError, match="another `palestra eval` writes here"):
            RowLog(tmp_path)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    RowLog(tmp_path).close()


def test_rows_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    text = "x" * 5000
    with RowLog(tmp_path) as log:

        def write(task: int) -> None:
            for k in range(20):
                log.append(row_of(f"t{task}", k, 1.0, messages=({"role": "user", "content": text},)))

        threads = [threading.Thread(target=write, args=(task,)) for task in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {row.key for row in read_rows(tmp_path)} == {(f"t{task}", k) for task in range(8) for k in range(20)}


def test_a_full_disk_leaves_whole_rows_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RowLog(tmp_path) as log:
        log.append(row_of("t0", 0, 1.0))
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:50], at))
        with pytest.raises(EvalError, match="only 50 of"):
            log.append(row_of("t1", 0, 1.0))
        monkeypatch.undo()
        assert (tmp_path / EPISODES).read_bytes().endswith(b"\n")
        log.append(row_of("t2", 0, 1.0))
    assert [row.task for row in read_rows(tmp_path)] == ["t0", "t2"]
    with pytest.raises(EvalError, match="was closed"):
        log.append(row_of("t3", 0, 1.0))


def test_owed_is_what_is_planned_and_has_no_row() -> None:
    header = header_of(2, 2)
    rows = latest([row_of("t0", 0, 1.0), row_of("t0", 1, None), row_of("other", 0, 1.0)])
    assert owed(header, rows, retry_errors=False) == [("t1", 0), ("t1", 1)]
    assert owed(header, rows, retry_errors=True) == [("t0", 1), ("t1", 0), ("t1", 1)]


def test_a_row_with_a_reward_counts_before_one_without() -> None:
    first, error, second = row_of("t", 0, 0.25), row_of("t", 0, None), row_of("t", 0, 0.75)
    assert latest([error, first])["t", 0] is first
    assert latest([first, error])["t", 0] is first
    assert latest([first, second])["t", 0] is second
    assert latest([error, replace(error, error="again")])["t", 0].error == "again"


def test_a_folder_is_begun_once_and_gone_on_with_by_wish(tmp_path: Path) -> None:
    header = header_of()
    with open_folder(tmp_path, header).log as log:
        log.append(row_of("t0", 0, 1.0))
    with pytest.raises(EvalError, match="has an evaluation already: go on with --resume"):
        open_folder(tmp_path, header)
    opened = open_folder(tmp_path, replace(header, created="later"), resume=True)
    opened.log.close()
    assert set(opened.rows) == {("t0", 0)}
    assert read_header(tmp_path) == header


def test_without_a_row_a_folder_is_begun_anew(tmp_path: Path) -> None:
    open_folder(tmp_path, header_of(model_seed=True)).log.close()
    open_folder(tmp_path, header_of(5)).log.close()
    assert len(read_header(tmp_path).tasks) == 5
    open_folder(tmp_path / "empty", header_of(), resume=True).log.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.0}, r"temperature \(was 1.0, is 0.0\)"),
        ({"args": {"levels": [1, 2]}}, r"args.levels \(was not given, is \[1, 2\]\)"),
        ({"k": 3}, r"k \(was 2, is 3\)"),
        ({"params": {"top_p": 0.9}}, "params.top_p"),
        ({"agent": {"kind": "python", "entry": "a:b"}}, "agent.entry.*agent.kind"),
    ],
)
def test_a_resumed_evaluation_that_differs_is_refused_and_the_difference_named(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    header = header_of()
    with open_folder(tmp_path, header).log as log:
        log.append(row_of("t0", 0, 1.0))
    other = replace(header, spec=replace(header.spec, **change))
    with pytest.raises(EvalError, match=named):
        open_folder(tmp_path, other, resume=True)
    assert read_header(tmp_path) == header
    opened = open_folder(tmp_path, other, resume=True, allow_changed=True)
    opened.log.close()
    (told,) = read_header(tmp_path).changes
    assert told["differences"] == differences(header, other)
    assert opened.rows


def test_other_tasks_or_another_version_of_the_environment_are_differences_and_prices_are_not() -> None:
    header = header_of()
    assert "the tasks themselves" in differences(header, header_of(4))[-1]
    assert differences(header, replace(header, provenance={"env": {"version": "2"}})) == [
        "the environment's version (was 1, is 2)"
    ]
    assert differences(header, replace(header, spec=replace(header.spec, price_in=1.0, request_timeout_s=1.0))) == []


def test_a_folder_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="is no evaluation"):
        read_header(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(EvalError, match="is no evaluation's header"):
        read_header(tmp_path)
    (tmp_path / "run.json").unlink()
    with RowLog(tmp_path) as log:
        log.append(row_of("t0", 0, 1.0))
    with pytest.raises(EvalError, match="episodes but no"):
        open_folder(tmp_path, header_of(), resume=True)


def test_tasks_are_drawn_without_repetition_and_a_larger_n_holds_a_smaller_one() -> None:
    assert sorted(draw(50, 50, 1)) == list(range(50))
    assert draw(10**9, 30, 7)[:10] == draw(10**9, 10, 7)
    assert draw(100, 10, 1) != draw(100, 10, 2)
    assert draw(4096, 4, 0) == [1931, 3267, 371, 4089], "a golden draw: folders of earlier versions go on"


def spec(**changes: Any) -> EvalSpec:
    return EvalSpec(CALCULATOR, "m", **changes)


def test_a_plan_names_each_task_by_its_content() -> None:
    source = arithmetic_tasks(size=20)
    plan = plan_tasks(source, spec(n=5, order="sequential"))
    assert [task.index for task in plan] == [0, 1, 2, 3, 4]
    assert [task.hash for task in plan] == [task_hash(source[index]) for index in range(5)]
    assert len(plan_tasks(source, spec())) == 20
    with pytest.raises(EvalError, match="has 20 tasks; give 1 to 20"):
        plan_tasks(source, spec(n=21))


def test_a_hash_depends_on_the_whole_content_and_survives_json() -> None:
    task = Task("What?", {"b": 1, "a": [1.5]}, "id", {"level": 1})
    same = task_from_json(json.loads(json.dumps(task_to_json(task))))
    assert task_hash(task) == task_hash(same)
    others = [replace(task, prompt="Who?"), replace(task, answer=None), replace(task, id="x"), replace(task, meta={})]
    assert len({task_hash(other) for other in [task, *others]}) == 5
    with pytest.raises(TaskError, match="no plain JSON"):
        task_hash(replace(task, answer={1, 2}))
    with pytest.raises(EvalError, match="tasks 0 and 1 are equal"):
        plan_tasks([Task("a"), Task("a")], spec(order="sequential"))


def test_seeds_are_of_a_task_and_of_an_episode() -> None:
    assert env_seed(0, "a") == env_seed(0, "a") != env_seed(1, "a")
    seeds = {model_seed(0, task, k) for task in ("a", "b") for k in range(8)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_provenance_is_plain_and_git_state_is_that_of_the_files_own_repository(tmp_path: Path) -> None:
    told = provenance(CALCULATOR)
    assert json.loads(json.dumps(told)) == told
    assert told["env"]["class"] == "palestra.envs.calculator:Calculator"
    assert (told["env"]["distribution"], told["env"]["version"]) == ("palestra", told["versions"]["palestra"])
    with pytest.raises(EnvError, match="no environment"):
        provenance("palestra/Nothing-v0")
    commands = [["init", "-q"], ["add", "a.py"], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]]
    (tmp_path / "a.py").write_text("")
    for command in commands:
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = git_state(tmp_path / "a.py")
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "a.py").write_text("changed")
    assert git_state(tmp_path / "a.py") == {**clean, "dirty": True}
    (tmp_path / "b.py").write_text("")
    assert git_state(tmp_path / "b.py") is None, "nobody tracks it"


def test_thousands_of_rows_are_read(tmp_path: Path) -> None:
    line = encode_row(row_of("t", 0, 1.0, messages=({"role": "user", "content": "x" * 200},))) + b"\n"
    (tmp_path / EPISODES).write_bytes(line * 3000)
    rows = read_rows(tmp_path)
    assert len(rows) == 3000
    assert isinstance(rows[0], Row)
