"""Evaluations played over real HTTP against a model of no weights: options, rows, retries, faults, agents, resuming."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from openai import OpenAI

from palestra.agents.evaluation import calls as eval_calls
from palestra.agents.evaluation.calls import Meter, wait_s
from palestra.agents.evaluation.folder import header_of
from palestra.agents.evaluation.players import PlainHost, eval_player
from palestra.agents.evaluation.records import RowLog, latest, read_header, read_rows
from palestra.agents.evaluation.relay import Relay, Upstream
from palestra.agents.evaluation.run import Evaluation, Pace
from palestra.agents.evaluation.types import EvalSpec
from palestra.agents.group import Players
from palestra.agents.types import GroupAssignment
from palestra.cli.config import ConfigError
from palestra.cli.eval import main
from palestra.cli.evaluation.options import agent_of, parser, spec_of
from palestra.envs.calculator import arithmetic_tasks
from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import make_env, register
from palestra.envs.rubrics import Rubric
from palestra.envs.tasks import write_tasks
from palestra.envs.types import Message, StopReason, Task
from tests.evals import CALCULATOR
from tests.fakes.engine import service_on_fake
from tests.fakes.hash_model import HashModel, serving
from tests.live import TOKEN


@pytest.fixture
def model() -> Iterator[HashModel]:
    with serving(HashModel()) as model:
        yield model


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of agents sets these for its process."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "NO_PROXY", "no_proxy", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(eval_calls, "wait_s", lambda attempt, asked: 0.01)
    monkeypatch.setattr("palestra.agents.evaluation.relay.wait_s", lambda attempt, asked: 0.01)


def run(model: HashModel, out: Path, *more: str, n: int = 6, k: int = 2) -> int:
    return main(
        [CALCULATOR, "--model", "hash", "--base-url", model.url, "-n", str(n), "-k", str(k), "--out", str(out), *more]
    )


def figures(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The table without what a clock says."""
    capsys.readouterr()
    assert main(["show", str(out), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    for name in ("seconds_p50", "seconds_p95", "call_p50", "call_p95"):
        told["cost"].pop(name)
    told.pop("folder")
    return told


def test_a_whole_evaluation(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    page = tmp_path / "r.html"
    more = ("--api-key-env", "MY_KEY", "--param", "top_p=0.9", "--html", str(page), "--price-in", "1", "--json")
    assert run(model, tmp_path / "a", *more) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["planned"], told["scored"], told["n"], told["k"]) == (12, 12, 6, 2)
    header, rows = read_header(tmp_path / "a"), read_rows(tmp_path / "a")
    assert {row.key for row in rows} == set(header.keys)
    assert "sk-secret" not in (tmp_path / "a" / "run.json").read_text() + page.read_text()
    assert model.keys == {"Bearer sk-secret"}
    for row in rows:
        assert row.messages[0]["role"] == "system"
        assert row.messages[-1]["role"] == "assistant"
        assert row.reward.components.keys() == {"valid_call", "right_call", "right_answer"}
        assert (row.usage.calls, row.usage.told, len(row.usage.call_seconds)) == (row.turns,) * 3
        assert row.usage.completion_tokens == 7 * row.turns
        assert row.ended.endswith("Z")
    assert all(len({row.seed for row in rows if row.task == task.hash}) == 1 for task in header.tasks)
    request = model.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"], request["top_p"]) == (
        "hash",
        1.0,
        1024,
        0.9,
    )
    assert len({request["seed"] for request in model.requests}) == 12, "a seed per episode, the same for its turns"
    assert told["cost"]["price"] == pytest.approx(told["cost"]["prompt_tokens"] / 1e6)
    assert header.provenance["env"]["distribution"] == "palestra"


def test_the_same_again_is_the_same_table(model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, threads in (("a", "1"), ("b", "16")):
        assert run(model, tmp_path / name, "-c", threads) == 0
    assert figures(tmp_path / "a", capsys) == figures(tmp_path / "b", capsys)
    assert run(model, tmp_path / "c", "--seed", "1", "--order", "sequential") == 0
    assert figures(tmp_path / "c", capsys) != figures(tmp_path / "a", capsys)


def test_a_busy_server_is_waited_for(model: HashModel, tmp_path: Path) -> None:
    answers = iter([(429, {"error": {"message": "slow down"}}, {"Retry-After": "7"}), (503, {}, {}), (500, {}, {})])
    model.before = lambda body: next(answers, None)
    assert run(model, tmp_path / "a", n=2, k=1) == 0
    assert sum(row.usage.retries for row in read_rows(tmp_path / "a")) == 3


def test_waits_grow_and_heed_the_server() -> None:
    assert [wait_s(attempt, None) for attempt in (0, 1, 4, 20)] == [0.5, 1.0, 8.0, 60.0]
    assert (wait_s(3, "2.5"), wait_s(0, "9999"), wait_s(1, "soon")) == (2.5, 60.0, 1.0)
    assert wait_s(0, "Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def faulty(model: HashModel, share: int) -> None:
    """Episodes with certain seeds get an error that is no use repeating."""
    model.before = lambda body: (
        (400, {"error": {"message": "bad luck", "code": "unlucky"}}, {}) if body["seed"] % share == 0 else None
    )


def test_errors_stay_apart_and_are_played_again_by_wish(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(model, 3)
    out = tmp_path / "a"
    assert run(model, out, n=8) == 3
    before = figures(out, capsys)
    assert 0 < before["errors"] < 16
    assert before["error_kinds"] == {"ModelStatusError": before["errors"]}
    rows = latest(read_rows(out))
    assert all(row.reward.value is None and "bad luck" in str(row.error) for row in rows.values() if not row.scored)
    asked = len(model.requests)
    assert run(model, out, "--resume", n=8) == 3, "errors remain"
    assert len(model.requests) == asked, "nothing was owed"
    model.before = lambda body: None
    assert run(model, out, "--resume", "--retry-errors", n=8) == 0
    assert len(read_rows(out)) == 16 + before["errors"]
    whole = tmp_path / "whole"
    assert run(model, whole, n=8) == 0
    assert figures(out, capsys) == figures(whole, capsys)


def test_what_fails_for_all_ends_the_evaluation(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty(model, 1)
    assert run(model, tmp_path / "a", "--max-errors", "5", "-c", "2", n=50) == 1
    assert (
        "the last 5 episodes have no reward; the last one: ModelStatusError: HTTP 400 unlucky"
        in capsys.readouterr().err
    )
    assert len(read_rows(tmp_path / "a")) < 20
    assert "bad luck" in (tmp_path / "a" / "eval.log").read_text()


def test_a_disk_that_is_full_ends_the_evaluation(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = os.pwrite, iter(range(1000))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data if next(count) < 3 else data[:9], at))
    assert run(model, tmp_path / "a", "-c", "1", n=20) == 1
    assert "cannot be written: only 9 of" in capsys.readouterr().err
    assert len(read_rows(tmp_path / "a")) == 3
    monkeypatch.undo()


def test_tasks_of_a_file_and_arguments_of_the_environment(model: HashModel, tmp_path: Path) -> None:
    write_tasks(tmp_path / "t.jsonl", [arithmetic_tasks(seed=9, size=50)[index] for index in range(5)])
    assert (
        main(
            [
                CALCULATOR,
                "--model",
                "m",
                "--base-url",
                model.url,
                "--tasks",
                str(tmp_path / "t.jsonl"),
                "--out",
                str(tmp_path / "a"),
            ]
        )
        == 0
    )
    assert {row.task_id for row in read_rows(tmp_path / "a")} == {f"calculator/9/{index}" for index in range(5)}
    assert run(model, tmp_path / "b", "--set", "args.seed=4", "--set", "args.levels=[2]", n=1, k=1) == 0
    assert read_rows(tmp_path / "b")[0].task_id.startswith("calculator/4/")
    assert read_header(tmp_path / "b").spec.args == {"seed": 4, "levels": [2]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--service", "x"], "either --base-url URL or --service DIR"),
        (["-n", "99999"], "has 4096 tasks; give 1 to 4096"),
        (["--retry-errors"], "--retry-errors goes with --resume"),
        (["--set", "levels=1"], "write args.NAME=VALUE"),
        (["--set", "args.nothing=1"], "nothing"),
        (["--set", "sandbox.boxes=0"], "sandbox.boxes is 0"),
        (["--param", "top_p"], "write NAME=VALUE"),
        (["--tasks", "/nowhere.jsonl"], "cannot be read"),
        (["--agent", "nowhere:f"], "there is no module 'nowhere'"),
        (["--set", 'agent.kind="python"'], "agent.entry must be given"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_asked(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main([CALCULATOR, "--model", "m", "--base-url", model.url, "--out", str(tmp_path / "a"), *more]) == 2
    assert said in capsys.readouterr().err
    assert model.requests == []
    assert run(model, tmp_path / "a", n=1, k=1) == 0, "the folder is free"


def test_options_become_a_spec() -> None:
    def made(*more: str, tasks: int = 200) -> EvalSpec:
        return spec_of(parser().parse_args(["e", "--model", "m", "--base-url", "http://x/v1/", *more]), tasks)

    assert (made().n, made(tasks=7).n, made("-n", "0").n, made("-n", "3").n) == (50, 7, 200, 3)
    assert (made().base_url, made("--no-model-seed").model_seed) == ("http://x/v1", False)
    assert agent_of("pkg.mod:name", {}).kind == agent_of("dir/file.py:name", {}).kind == "python"
    assert agent_of("./agent --prompt {prompt}", {"pass_env": ["A"]}).pass_env == ["A"]
    assert agent_of("sh -c 'a:b'", {}).kind == "command"
    assert agent_of(None, {}).kind == "chat"
    with pytest.raises(ConfigError, match="has no effect"):
        agent_of(None, {"entry": "a:b"})


def test_the_environments_tasks_of_now_and_the_rubric_of_now(
    model: HashModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rescoring asks no model: the same rubric gives the same rewards, another one others."""
    from palestra.envs import calculator

    faulty(model, 5)
    assert run(model, tmp_path / "a", n=8) == 3
    asked, old = len(model.requests), latest(read_rows(tmp_path / "a"))
    assert main(["rescore", str(tmp_path / "a")]) == 3
    new = latest(read_rows(tmp_path / "a-rescored"))
    assert {key: row.reward for key, row in new.items()} == {key: row.reward for key, row in old.items()}
    monkeypatch.setattr(calculator, "WEIGHTS", {"valid_call": 1.0, "right_call": 0.0, "right_answer": 0.0})
    assert main(["rescore", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 3
    new = latest(read_rows(tmp_path / "b"))
    assert all(row.reward.value == row.reward.components["valid_call"] for row in new.values() if row.scored)
    assert [row.scored for row in new.values()] == [row.scored for row in old.values()]
    assert len(model.requests) == asked
    assert read_header(tmp_path / "b").rescored_from == str(tmp_path / "a")
    capsys.readouterr()
    monkeypatch.setattr(calculator, "SYSTEM", "other")  # part of every task
    assert main(["rescore", str(tmp_path / "a"), "--out", str(tmp_path / "c")]) == 1
    assert "is not the one that was played" in capsys.readouterr().err


def test_a_grader_that_fails_leaves_the_reward_unknown(
    model: HashModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palestra.envs.calculator import Calculator

    assert run(model, tmp_path / "a", n=2, k=1) == 0

    def broken(self: Calculator, task: Any, transcript: Any) -> float:
        raise RuntimeError("the grader is away")

    monkeypatch.setattr(Calculator, "score", broken)
    assert main(["rescore", str(tmp_path / "a")]) == 3
    rows = read_rows(tmp_path / "a-rescored")
    assert all(row.reward.value is None and "the grader is away" in row.reward.note for row in rows)


def play_agent(messages: list[dict[str, Any]], tools: list[Any], base_url: str, api_key: str) -> None:
    """A loop over the official client, as somebody else might have written it."""
    from palestra.envs.arithmetic import evaluate

    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    while True:
        reply = client.chat.completions.create(model="anything", messages=messages, tools=tools)  # type: ignore[arg-type]
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            try:
                result = str(evaluate(json.loads(call.function.arguments)["expression"]))  # type: ignore[union-attr]
            except ValueError as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_an_agent_of_ones_own_plays_through_the_relay(
    model: HashModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its errors of tools read otherwise than ours, which the model's hash sees; all else is the same."""
    assert run(model, tmp_path / "chat") == 0
    assert run(model, tmp_path / "own", "--agent", "tests.test_eval_run:play_agent") == 0
    rows, others = (latest(read_rows(tmp_path / name)) for name in ("own", "chat"))
    assert rows.keys() == others.keys()
    alike = [key for key in rows if not others[key].tool_errors]
    assert len(alike) > 6
    for key in alike:
        assert rows[key].reward == others[key].reward
        assert rows[key].turns == rows[key].usage.calls == others[key].turns
    assert {request["model"] for request in model.requests} == {"hash"}
    assert main(["diff", str(tmp_path / "chat"), str(tmp_path / "own"), "--json"]) == 0


UPSTREAM: Mapping[str, Any] = {"model": "hash", "temperature": 0.5, "max_tokens": 99}


def opened(relay: Relay, group: str = "t", index: int = 0) -> Any:
    return relay.open_session(GroupAssignment(group, 2, 0, 0, 0), index, "t")


def test_the_relay_keeps_conversations_apart_and_bounds_turns(model: HashModel) -> None:
    meter = Meter()
    upstream = Upstream(model.url, "sk-real", UPSTREAM, 2, 10.0)
    with Relay(upstream, meter, lambda task, k: {"seed": 5 + k}) as relay:
        one, two = opened(relay), opened(relay, index=1)
        client = OpenAI(base_url=one.session_url, api_key="unused", max_retries=0)
        first = [{"role": "user", "content": "What is 1 plus 2?"}]
        message = client.chat.completions.create(model="x", messages=first, temperature=0.1).choices[0].message  # type: ignore[arg-type]
        whole = [*first, message.model_dump(exclude_none=True), {"role": "user", "content": "sure?"}]
        stream = client.chat.completions.create(model="x", messages=whole, stream=True, max_completion_tokens=7)  # type: ignore[arg-type]
        pieces = [chunk.choices[0] for chunk in stream]
        assert pieces[-1].finish_reason in ("stop", "tool_calls")
        (branch,) = relay.conversation(one)
        assert [m["role"] for m in branch] == ["user", "assistant", "user", "assistant"]
        assert relay.conversation(two) == []
        with pytest.raises(Exception, match="2 turns are spent") as spent:
            client.chat.completions.create(model="x", messages=first)  # type: ignore[arg-type]
        assert spent.value.body["code"] == "budget_exceeded"  # type: ignore[attr-defined]
        relay.close_session(one, None)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="the episode has ended"):
            client.chat.completions.create(model="x", messages=first)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="opens no session"):
            OpenAI(base_url=two.base_url, api_key="wrong").chat.completions.create(model="x", messages=first)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="palestra serve"):
            client.responses.create(model="x", input="hello")
        assert client.models.list().data[0].id == "hash"
    assert model.keys == {"Bearer sk-real"}
    asked = [
        (request["temperature"], request.get("max_tokens"), request.get("max_completion_tokens"), request["seed"])
        for request in model.requests
    ]
    assert asked == [(0.1, 99, None, 5), (0.5, None, 7, 5)]
    assert meter.take("t-0").calls == 2


def test_the_relay_passes_errors_on_and_repeats_what_is_busy(model: HashModel) -> None:
    answers = iter([(503, {}, {}), (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, {})])
    model.before = lambda body: next(answers, None)
    with Relay(Upstream(model.url, "k", UPSTREAM, 4, 10.0), Meter()) as relay:
        client = OpenAI(base_url=opened(relay).session_url, api_key="unused", max_retries=0)
        with pytest.raises(Exception, match="too long"):
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "1"}])
        assert len(model.requests) == 2
        with pytest.raises(Exception, match="no chat completion"):
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "1"}], n=2)


@pytest.fixture
def evaluation(model: HashModel, tmp_path: Path) -> Iterator[Evaluation]:
    spec = EvalSpec(CALCULATOR, "hash", model.url, n=8, k=2)
    source = arithmetic_tasks()
    with RowLog(tmp_path) as log:
        header = header_of(spec, source)
        yield Evaluation(header, source, PlainHost(model.url, "k"), log, {}, Meter(), Pace(concurrency=1))


def players(evaluation: Evaluation, folder: Path) -> Players:
    spec = evaluation.header.spec
    player = eval_player(spec, evaluation.meter, evaluation.key_of, evaluation.leaving, folder)
    return Players(lambda: make_env(spec.env), player)


def test_a_wish_to_stop_lets_what_is_under_way_end_and_begins_nothing(
    evaluation: Evaluation, model: HashModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One episode at a time: its siblings and the other tasks are not begun, which is no error of theirs."""
    caplog.set_level(logging.CRITICAL)
    model.before = lambda body: evaluation.draining.set()
    evaluation.run(evaluation.header.keys, players(evaluation, tmp_path), lambda standing: None)
    (row,) = evaluation.rows.values()
    assert row.scored
    assert evaluation.fault is None


def test_a_second_wish_leaves_at_once(evaluation: Evaluation, model: HashModel, tmp_path: Path) -> None:
    model.delay_s = 30.0

    def leave(standing: Any) -> None:
        if standing.running == 1:
            evaluation.draining.set()
            evaluation.leaving.set()

    began = time.monotonic()
    evaluation.run(evaluation.header.keys, players(evaluation, tmp_path), leave)
    assert time.monotonic() - began < 25, "nobody waited for the replies"
    assert evaluation.rows == {}


class Steps(MessageEnv):
    """Gives a reward for each of two steps, and one at the end."""

    tasks = (Task("go", id="go"),)
    final: ClassVar[float] = 0.5

    def respond(self, action: Message) -> Response:
        return Response([{"role": "user", "content": "on"}], StopReason.ENV_DONE if self.turn == 2 else None, 0.125)

    def score(self, task: Task, transcript: Sequence[Message]) -> float:
        return self.final


class Judged(Steps):
    """The rubric judges turns, too."""

    @property
    def rubric(self) -> Rubric:  # type: ignore[override]
        return Rubric({"final": lambda scoring: self.final}, per_turn={"polite": lambda scoring: 0.25})

    def score(self, task: Task, transcript: Sequence[Message]) -> Any:
        return MessageEnv.score(self, task, transcript)


@pytest.mark.parametrize(("env", "before", "after"), [("tests/Steps-v0", 0.75, 1.25), ("tests/Judged-v0", 1.25, 1.5)])
def test_rewards_of_steps_count_once_when_scored_again(
    model: HashModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str, before: float, after: float
) -> None:
    """What an environment gave for its steps stays; what a rubric says of turns is judged again (and is then all that counts of them)."""
    for name, cls in (("tests/Steps-v0", Steps), ("tests/Judged-v0", Judged)):
        if name not in gym.registry:
            register(name)(cls)
    assert main([env, "--model", "m", "--base-url", model.url, "--out", str(tmp_path / "a")]) == 0
    assert read_rows(tmp_path / "a")[0].reward.value == before
    monkeypatch.setattr(Steps, "final", 1.0)
    assert main(["rescore", str(tmp_path / "a")]) == 0
    assert read_rows(tmp_path / "a-rescored")[0].reward.value == after


@pytest.mark.walk
def test_sessions_of_a_service_are_played_and_kept_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message loop and an agent, against the real service on an engine that draws its tokens by hash."""
    with service_on_fake(tmp_path / "service") as stage:
        folder = tmp_path / "served"
        (folder / "roles").mkdir(parents=True)
        (folder / "roles" / "admin.token").write_text(TOKEN)
        (folder / "serve.json").write_text(json.dumps({"url": f"{stage.live.url}/v1", "control_url": stage.live.url}))
        base = [
            CALCULATOR,
            "--model",
            "m",
            "--service",
            str(folder),
            "-n",
            "3",
            "-k",
            "2",
            "--max-tokens",
            "16",
            "--max-turns",
            "2",
        ]
        base += ["--set", "args.prompt=plain", "--temperature", "0.7"]
        assert main([*base, "--out", str(tmp_path / "a")]) == 0
        rows = read_rows(tmp_path / "a")
        sessions = stage.live.service.log.reader.read_sessions()
        assert len(rows) == len(sessions) == 6
        assert sorted(str(s.outcome and s.outcome.reward) for s in sessions) == sorted(
            str(r.reward.value) for r in rows
        )
        assert all(0 < row.usage.completion_tokens <= 16 * row.turns and row.usage.told == row.turns for row in rows)
        assert {heard.params["temperature"] for heard in stage.engine.heard} == {0.7}
        assert stage.live.run(stage.live.service.status())["groups"]["ready"] == 0, "nothing for a trainer"
        assert main([*base, "--out", str(tmp_path / "b"), "--agent", "tests.test_eval_run:play_agent"]) == 0
        assert all(row.turns >= 1 and row.messages[-1]["role"] == "assistant" for row in read_rows(tmp_path / "b"))
    capsys.readouterr()
    assert main([*base, "--out", str(tmp_path / "c")]) == 2
    assert "nothing is served there" in capsys.readouterr().err


def test_what_a_server_does_not_tell_is_counted_and_fields_can_be_taken_out(model: HashModel, tmp_path: Path) -> None:
    from tests.fakes import hash_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_model, "usage", lambda body: None)
        more = ("--param", "max_tokens=null", "--param", "max_completion_tokens=5", "--no-model-seed")
        assert run(model, tmp_path / "a", *more, n=2, k=1) == 0
    assert all(row.usage.told == 0 < row.usage.calls for row in read_rows(tmp_path / "a"))
    assert all("max_tokens" not in body and "seed" not in body for body in model.requests)
    assert {body["max_completion_tokens"] for body in model.requests} == {5}


def test_the_guide_names_every_option_and_no_other() -> None:
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    named = set(re.findall(r"--[a-z][a-z-]*", text))
    known = {option for action in parser()._actions for option in action.option_strings if option.startswith("--")}
    assert known - named == {"--help"}
    assert named - known <= {"--worst", "--prompt"}
