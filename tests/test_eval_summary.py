"""The figures of an evaluation, how they are told, and the comparison of two."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.agents.evaluation.compare import compare
from palestra.agents.evaluation.records import RowLog, latest, write_header
from palestra.agents.evaluation.summary import error_kind, summarise, worst
from palestra.agents.evaluation.types import EvalError, Header, Key, Row, Usage
from palestra.cli.eval import main
from palestra.cli.evaluation.live import clock, line
from palestra.cli.evaluation.table import headlines, right_line
from palestra.envs.types import Reward, StopReason
from tests.evals import header_of, row_of


def table(rows: list[Row]) -> dict[Key, Row]:
    return latest(rows)


def hundred() -> tuple[Header, dict[Key, Row]]:
    """25 tasks x 4: 80 right, 10 wrong, 10 errors, spread over the tasks."""
    values = [1.0] * 80 + [0.0] * 10 + [None] * 10
    random.Random(0).shuffle(values)
    keys = [(f"t{at // 4}", at % 4) for at in range(100)]
    return header_of(25, 4), table([row_of(*key, value) for key, value in zip(keys, values, strict=True)])


def test_errors_stand_apart_and_both_bounds_are_told() -> None:
    header, rows = hundred()
    summary = summarise(header, rows)
    assert (summary.finished, summary.scored, summary.right, summary.errors, summary.owed) == (100, 90, 80, 10, 0)
    assert summary.right_share.mean == pytest.approx(80 / 90)
    assert summary.right_bounds is not None
    assert (summary.right_bounds.low, summary.right_bounds.high) == (0.8, 0.9)
    assert (
        right_line(header, summary)
        == "scored 90/100, 80 right: 88.9% (80.0-90.0% with the 10 errors as wrong or right)"
    )
    assert summary.error_kinds == {"AgentError": 10}
    assert "10 errors, without a reward (AgentError: 10)" in headlines(header, summary)[1]


def test_figures_do_not_depend_on_the_order_of_rows() -> None:
    header, rows = hundred()
    shuffled = list(rows.items())
    random.Random(5).shuffle(shuffled)
    assert summarise(header, dict(shuffled)) == summarise(header, rows)


def test_pass_at_k_needs_k_scored_episodes_of_a_task() -> None:
    header = header_of(3, 4)
    values = {"t0": [1.0, 0.0, 0.0, 0.0], "t1": [1.0, 1.0, 1.0, 1.0], "t2": [0.0, None, 0.99, 0.0]}
    rows = table([row_of(task, k, value) for task, row in values.items() for k, value in enumerate(row)])
    one, two, four = summarise(header, rows).passes
    assert (one.tasks, one.at_least_one) == (3, pytest.approx((0.25 + 1 + 0) / 3))
    assert (two.tasks, two.at_least_one, two.all_right) == (3, pytest.approx((0.5 + 1 + 0) / 3), pytest.approx(1 / 3))
    assert (four.tasks, four.at_least_one, four.all_right) == (2, 1.0, 0.5)
    lenient = replace(header, spec=replace(header.spec, pass_reward=0.9))
    assert summarise(lenient, rows).right == summarise(header, rows).right + 1


def test_what_is_owed_and_what_is_not_planned_any_more() -> None:
    header = header_of(2, 2)
    summary = summarise(header, table([row_of("t0", 0, 1.0), row_of("gone", 0, 0.0), row_of("t0", 5, 0.0)]))
    assert (summary.planned, summary.finished, summary.owed, summary.foreign, summary.right) == (4, 1, 3, 2, 1)
    said = "\n".join(headlines(header, summary))
    assert "3 of 4 episodes were not played yet" in said
    assert "2 rows are of episodes that are not planned" in said


def test_an_empty_evaluation_has_dashes_and_no_figures() -> None:
    header = header_of()
    summary = summarise(header, {})
    assert (summary.reward.mean, summary.reward.interval, summary.right_bounds) == (None, None, None)
    assert right_line(header, summary) == "scored 0/0, 0 right"


def test_components_stops_tokens_and_price() -> None:
    header = header_of(2, 1, price_in=2.0, price_out=10.0)
    cut = row_of(
        "t1", 0, 0.0, components={"a": 0.0}, stop_reason=StopReason.MAX_TURNS, truncated=True, terminated=False
    )
    cut = replace(cut, usage=Usage(1, 0, 0, 0, 0, (5.0,), 2))
    summary = summarise(header, table([row_of("t0", 0, 1.0, components={"a": 1.0, "b": 0.5}), cut]))
    assert (summary.components["a"].mean, summary.components["a"].n, summary.components["b"].n) == (0.5, 2, 1)
    assert [(stop.reason, stop.share, stop.mean_reward) for stop in summary.stops] == [
        ("answer", 0.5, 1.0),
        ("max_turns", 0.5, 0.0),
    ]
    assert (summary.truncated, summary.cost.calls, summary.cost.calls_without_usage, summary.cost.retries) == (
        1,
        3,
        1,
        2,
    )
    assert summary.cost.price == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    assert (summary.cost.call_p50, summary.cost.call_p95) == (0.3, 5.0)


def test_a_grader_that_failed_is_an_error_of_its_own_kind() -> None:
    reward = Reward(None, note="could not be judged", errors={"judge": "TimeoutError: 30 s"})
    row = row_of("t0", 0, None, error=None, reward=reward)
    assert error_kind(row) == "judge"
    assert error_kind(replace(row, reward=Reward(None, note="x" * 100))) == "x" * 60
    assert error_kind(replace(row, reward=Reward(None))) == "no reason given"


def test_the_worst_come_first_and_errors_before_them() -> None:
    rows = table([row_of("a", 0, 0.5), row_of("b", 0, None), row_of("c", 0, -1.0), row_of("d", 0, 1.0)])
    assert [row.task for row in worst(rows, 3)] == ["b", "c", "a"]


def test_a_comparison_is_paired_by_task() -> None:
    """Tasks differ much, B is a little better on each: unpaired this would be noise."""
    header = header_of(12, 2)
    base = [index / 12 for index in range(12)]
    rows = [
        [row_of(f"t{i}", k, base[i] + more, components={"c": base[i]}) for i in range(12) for k in range(2)]
        for more in (0.0, 0.05)
    ]
    result = compare((header, table(rows[0])), (replace(header, spec=replace(header.spec, model="b")), table(rows[1])))
    reward, _, component = result.lines
    assert reward.difference.mean == pytest.approx(0.05)
    assert reward.difference.interval is not None
    assert reward.difference.interval.low > 0.04
    assert reward.difference.p == pytest.approx(2 / 2**12)
    assert reward.first.interval is not None
    assert reward.second.interval is not None
    assert reward.first.interval.high > reward.second.interval.low
    assert (component.name, component.difference.mean, component.difference.p) == ("c", 0.0, 1.0)
    assert (result.better, result.worse, result.left_out) == (12, 0, 0)
    assert result.settings == (("model", "m", "b"),)


def test_different_tasks_are_not_compared() -> None:
    with pytest.raises(EvalError, match="3 in both"):
        compare((header_of(3), {}), (header_of(4), {}))


def test_tasks_without_a_score_in_one_are_left_out_and_counted() -> None:
    header = header_of(3, 1)
    first = table([row_of(f"t{i}", 0, 0.0) for i in range(3)])
    second = table([row_of("t0", 0, 1.0), row_of("t1", 0, None), row_of("t2", 0, 1.0)])
    result = compare((header, first), (header, second))
    assert (result.tasks, result.left_out, result.better) == (2, 1, 2)


def written(folder: Path, header: Header, rows: dict[Key, Row]) -> Path:
    with RowLog(folder) as log:
        write_header(folder, header)
        for row in rows.values():
            log.append(row)
    return folder


def test_show_and_diff_read_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, rows = hundred()
    one = written(tmp_path / "one", header, rows)
    other = {
        key: replace(row, reward=Reward(1.0, {"\x1b[31mred": 1.0}), task_id="\x1b]0;x\x07") for key, row in rows.items()
    }
    two = written(tmp_path / "two", header, other)
    assert main(["show", str(one), "--worst", "11"]) == 0
    said = capsys.readouterr().out
    assert "88.9% (80.0-90.0%" in said
    assert said.count("AgentError: the model is away") == 10
    assert main(["show", str(two), "--worst", "3"]) == 0
    assert "\x1b" not in capsys.readouterr().out, "a model's text steers no terminal"
    assert main(["show", str(one), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["scored"], told["right"], told["errors"], told["right_bounds"]["high"]) == (90, 80, 10, 0.9)
    assert main(["diff", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"][0]["difference"]["mean"] > 0
    assert main(["diff", str(one), str(two)]) == 0
    assert "B is better on" in capsys.readouterr().out
    three = written(tmp_path / "three", header_of(2, 4), {})
    assert main(["diff", str(one), str(three)]) == 1
    assert "different tasks" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "none")]) == 1


def test_the_live_line() -> None:
    from palestra.agents.evaluation.run import Standing

    standing = Standing(40, 12, 8, 1, 0.4321, [0.5, 1.0, 3.0], 83.4)
    assert line(standing) == "12/40 episodes  8 running  1 errors  reward 0.432  calls 1.00 s, p95 3.00 s  left 1:23"
    assert line(Standing(4, 0, 0, 0, None, [], None), "stopping") == "0/4 episodes  0 running  stopping"
    assert [clock(s) for s in (0, 65, 7265)] == ["0:00", "1:05", "2:01:05"]


def test_parquet_holds_a_line_per_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as parquet

    header, rows = hundred()
    key = next(iter(rows))
    rows[key] = replace(rows[key], reward=Reward(0.5, {"a": 0.5}), messages=({"role": "user", "content": "\u2028 é"},))
    folder = written(tmp_path / "run", header, rows)
    assert main(["show", str(folder), "--parquet"]) == 0
    capsys.readouterr()
    back = parquet.read_table(folder / "episodes.parquet").to_pylist()
    assert len(back) == 100
    assert [(line["task"], line["k"]) for line in back] == list(itertools.islice(header.keys, 100))
    assert sum(line["reward"] is None for line in back) == sum(not row.scored for row in rows.values())
    first = next(line for line in back if (line["task"], line["k"]) == key)
    assert (first["component/a"], json.loads(first["messages"])[0]["content"]) == (0.5, "\u2028 é")


def test_parquet_without_its_extra_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    argv = [
        "palestra/Calculator-v0",
        "--model",
        "m",
        "--base-url",
        "http://127.0.0.1:9/v1",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*argv, "--parquet"]) == 2
    assert "pip install 'palestra[parquet]'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
