"""Agents that play by themselves: how their episodes end, what they are worth, and what becomes of faults."""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from gymnasium.error import ResetNeeded

from palestra.agents import foreign
from palestra.agents.foreign import play_agent
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import AgentPlayer
from palestra.agents.session import current
from palestra.agents.stops import stop_in
from palestra.agents.types import AgentError, GroupAssignment, Limits, Outcome, PolicyStop
from palestra.agents.workspace import Workspaces, remove_tree
from palestra.envs.calculator import calls
from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import make_env
from palestra.envs.types import EnvError, Episode, Message, Reward, StopReason, Task
from tests.fakes.sessions import FakeSessions

TASK = Task("What is 12 plus 30?", 42, "t")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Judge(MessageEnv):
    """Scores the last message, or `answer.txt` of the workspace; notes what it saw."""

    system = "Be brief."

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[Message], Path | None]] = []

    def respond(self, action: Message) -> Response:
        raise AssertionError("an agent plays by itself")

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        self.seen.append((list(transcript), self.workspace))
        assert self.workspace is not None
        file = self.workspace / "answer.txt"
        text = file.read_text() if file.exists() else transcript[-1]["content"] if transcript else ""
        return Reward(float(text == str(task.answer)), {"exact": 1.0}, f"said {text!r}")


class Playing:
    """Runs a function of the test with the context."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def run(self, task: Task, session_url: str, workspace: Path) -> Outcome:
        return self._run(current()) or Outcome()


def play(
    run: Callable[..., Any], host: FakeSessions | None = None, env: Any = None, deadline_s: float = 20.0, **more: Any
) -> Episode:
    host = host or FakeSessions()
    return play_agent(
        env or Judge(), Playing(run), host, host.handle(), Limits(deadline_s=deadline_s), task=TASK, seed=0, **more
    )


class TestEnds:
    def test_an_agent_that_returns_is_terminated_and_scored_by_the_environment(self) -> None:
        host, env = FakeSessions(), Judge()

        def run(context: Any) -> None:
            host.say(context.session.api_key, context.messages)

        episode = play(run, host, env)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (True, False, StopReason.ANSWER)
        assert (episode.reward.value, episode.reward.components, episode.turns) == (1.0, {"exact": 1.0}, 1)
        assert episode.messages == ({"role": "system", "content": "Be brief."}, user(TASK.prompt), said("42"))
        assert episode.step_rewards == (0.0,)
        (transcript, workspace) = env.seen[0]
        assert transcript == [said("42")]
        assert workspace is not None
        assert not workspace.exists()

    def test_an_agent_without_a_turn_is_scored_too(self) -> None:
        episode = play(lambda context: None)
        assert (episode.turns, episode.reward.value, episode.terminated) == (0, 0.0, True)
        assert [message["role"] for message in episode.messages] == ["system", "user"]

    def test_files_that_it_leaves_are_scored_and_can_be_kept(self, tmp_path: Path) -> None:
        def run(context: Any) -> None:
            assert list(context.workspace.iterdir()) == []
            (context.workspace / "answer.txt").write_text("42")

        episode = play(run, workspaces=Workspaces(tmp_path / "kept", keep=True))
        assert episode.reward.value == 1.0
        (folder,) = (tmp_path / "kept").iterdir()
        assert (folder / "answer.txt").read_text() == "42"
        assert "g-0-0" in folder.name

    def test_an_answer_of_its_own_is_the_last_message(self) -> None:
        env = Judge()
        episode = play(lambda context: Outcome(answer="42"), env=env)
        assert episode.reward.value == 1.0
        assert episode.messages[-1] == said("42")
        host = FakeSessions()
        episode = play(lambda context: (host.say("key-0", context.messages), Outcome(answer=" 42 "))[1], host, env)
        assert [message["content"] for message in episode.messages[2:]] == ["42"]

    def test_its_own_score_stands_before_the_rubrics_and_what_it_says_is_kept(self) -> None:
        env = Judge()
        outcome = Outcome(reward=0.25, components={"tests": 3.0}, info={"exit": 7})
        episode = play(lambda context: outcome, env=env)
        assert (episode.reward.value, episode.reward.components) == (0.25, {"tests": 3.0})
        assert '"exit": 7' in episode.reward.note
        assert env.seen == []
        episode = play(lambda context: Outcome(components={"mine": 1.0}))
        assert episode.reward.components == {"exact": 1.0, "mine": 1.0}

    def test_a_score_that_is_no_number_is_unknown(self) -> None:
        episode = play(lambda context: Outcome(reward=math.nan))
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.ANSWER)
        assert "nan" in episode.reward.note

    def test_wrapped_environments_are_played_and_calls_counted(self) -> None:
        host = FakeSessions(
            script=lambda key, messages: calls("12+30") if messages[-1]["role"] == "user" else said("42")
        )

        def run(context: Any) -> None:
            messages = [*context.messages, host.say("key-0", context.messages)]
            messages.append({"role": "tool", "tool_call_id": "call_0", "content": "42"})
            host.say("key-0", messages)

        episode = play(run, host, make_env("palestra/Calculator-v0"))
        assert (episode.turns, episode.tool_calls) == (2, 1)
        assert [m["role"] for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]


class TestCuts:
    def test_the_deadline_cuts_an_agent_that_hangs_and_what_there_is_is_scored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(foreign, "OVERTIME_S", 0.1)
        host, release, woken = FakeSessions(), threading.Event(), threading.Event()

        def run(context: Any) -> None:
            host.say("key-0", context.messages)
            release.wait(60)
            woken.set()

        episode = play(run, host, deadline_s=0.2)
        assert (episode.terminated, episode.truncated, episode.stop_reason) == (False, True, StopReason.DEADLINE)
        assert (episode.reward.value, episode.turns) == (1.0, 1)
        release.set()
        assert woken.wait(10)

    def test_one_that_ends_after_the_deadline_was_cut_as_well(self) -> None:
        episode = play(lambda context: threading.Event().wait(0.1) or Outcome(answer="42"), deadline_s=0.05)
        assert (episode.stop_reason, episode.truncated, episode.reward.value) == (StopReason.DEADLINE, True, 1.0)

    def test_a_rubric_that_cannot_score_what_there_is_leaves_it_unknown(self) -> None:
        class Strict(Judge):
            def score(self, task: Task, transcript: Sequence[Message]) -> float:
                raise ValueError("no answer")

        def run(context: Any) -> None:
            raise PolicyStop(StopReason.DEADLINE)

        episode = play(run, env=Strict())
        assert (episode.reward.value, episode.truncated, episode.error) == (None, True, None)
        assert "no answer" in episode.reward.note

    @pytest.mark.parametrize(
        ("status", "code", "reason"),
        [
            (400, "context_length_exceeded", StopReason.CONTEXT),
            (400, "budget_exceeded", StopReason.DEADLINE),
            (409, "session_closed", StopReason.CANCELLED),
        ],
    )
    def test_a_clients_error_that_is_no_fault_truncates(self, status: int, code: str, reason: StopReason) -> None:
        def run(context: Any) -> None:
            try:
                raise api_error(status, {"code": code, "message": "enough"})
            except openai.APIStatusError as error:
                raise RuntimeError("the graph failed") from error

        episode = play(run)
        assert (episode.stop_reason, episode.truncated, episode.reward.value) == (reason, True, 0.0)
        assert "enough" in episode.reward.note


def api_error(status: int, body: dict[str, Any]) -> openai.APIStatusError:
    import httpx2

    response = httpx2.Response(status, request=httpx2.Request("POST", "http://x"))
    return openai.APIStatusError("failed", response=response, body=body)


class TestStops:
    def test_other_clients_and_groups_of_errors(self) -> None:
        class Other(Exception):
            def __init__(self) -> None:
                self.status_code = 400
                self.body = {"type": "error", "error": {"code": "context_length_exceeded", "message": "full"}}

        stop = stop_in(ExceptionGroup("two", [ValueError("x"), Other()]))
        assert stop is not None
        assert (stop.reason, str(stop)) == (StopReason.CONTEXT, "full")

    def test_server_faults_and_bugs_are_no_stops(self) -> None:
        assert stop_in(api_error(503, {"code": "context_length_exceeded"})) is None
        assert stop_in(api_error(400, {"code": "unknown_field"})) is None
        ring = RuntimeError("ring")
        ring.__cause__ = ring
        assert stop_in(ring) is None
        mine = KeyError("mine")
        mine.__context__, mine.__suppress_context__ = PolicyStop(StopReason.CONTEXT), True
        assert stop_in(mine) is None
        mine.__suppress_context__ = False
        assert stop_in(mine) is mine.__context__


class TestFaults:
    @pytest.mark.parametrize(
        "fault", [AgentError("the engine died"), ValueError("a bug"), SystemExit(3), api_error(503, {"code": "x"})]
    )
    def test_anything_else_has_no_reward(self, fault: BaseException) -> None:
        def run(context: Any) -> None:
            raise fault

        episode = play(run)
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
        assert (episode.terminated, episode.truncated, episode.task_id) == (False, False, "t")
        assert type(fault).__name__ in (episode.error or "")

    def test_a_service_that_is_gone_has_no_reward(self) -> None:
        class Gone(FakeSessions):
            def conversation(self, handle: Any) -> Any:
                raise AgentError("connection refused")

        episode = play(lambda context: Outcome(answer="42"), Gone())
        assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
        assert "connection refused" in (episode.error or "")

    def test_an_environment_that_fails_has_no_reward(self) -> None:
        class NoBox(Judge):
            def setup(self, task: Task) -> None:
                raise EnvError("no box is left")

        class Blind(Judge):
            def replay(self, transcript: Sequence[Message]) -> None:
                raise KeyError("what")

        for env, text in ((NoBox(), "no box is left"), (Blind(), "replay: KeyError")):
            episode = play(lambda context: None, env=env)
            assert (episode.reward.value, episode.stop_reason) == (None, StopReason.INFRA)
            assert text in (episode.error or "")

    def test_the_workspace_is_removed_after_a_fault_whatever_is_in_it(self) -> None:
        seen: list[Path] = []

        def run(context: Any) -> None:
            seen.append(context.workspace)
            locked = context.workspace / "a" / "b"
            locked.mkdir(parents=True)
            (locked / "file").write_text("x")
            os.symlink("/", context.workspace / "a" / "root")
            locked.chmod(0o500)
            raise ValueError("a bug")

        play(run)
        assert not seen[0].exists()

    def test_a_folder_that_is_not_there_is_no_error(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        remove_tree(tmp_path / "nothing")
        assert "could not be removed" in caplog.text

    def test_nothing_is_graded_without_an_episode(self) -> None:
        with pytest.raises(ResetNeeded, match="nothing to grade"):
            Judge().grade([said("42")])


class TestContext:
    def test_outside_of_an_agent_it_says_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match="copy_context"):
            current()

    def test_threads_have_it_where_the_context_is_copied_and_not_otherwise(self) -> None:
        found: dict[str, str] = {}

        def look(name: str) -> None:
            try:
                found[name] = current().session.api_key
            except RuntimeError:
                found[name] = "none"

        def run(context: Any) -> None:
            copied = contextvars.copy_context()
            threads = [
                threading.Thread(target=copied.run, args=(look, "copied")),
                threading.Thread(target=look, args=("plain",)),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            look("own")

        play(run)
        assert found == {"copied": "key-0", "plain": "none", "own": "key-0"}
        with pytest.raises(RuntimeError):
            current()


class TestGroups:
    def test_every_session_is_opened_played_and_closed_and_the_leader_goes_ahead(self) -> None:
        together, host = threading.Barrier(3), FakeSessions()

        def run(context: Any) -> None:
            host.say(context.session.api_key, context.messages)
            together.wait(20)  # the leader still plays when the others come

        players = Players(Judge, AgentPlayer(Playing(run)))
        given = GroupAssignment("g", 3, 0, TASK, 9)
        episodes = run_group(given, players, host, Limits(deadline_s=30), EpisodeThreads(8))
        assert [episode.reward.value for episode in episodes] == [1.0] * 3
        assert set(host.closed) == {"key-0", "key-1", "key-2"}
        assert host.events[:2] == [("open", "key-0"), ("reply", "key-0")]

    def test_a_leader_that_fails_does_not_hold_the_others_up(self) -> None:
        def run(context: Any) -> Outcome:
            if context.session.api_key == "key-0":
                raise ValueError("a bug")
            return Outcome(answer="42")

        players = Players(Judge, AgentPlayer(Playing(run)))
        episodes = run_group(GroupAssignment("g", 3, 0, TASK, 9), players, FakeSessions(), Limits(), EpisodeThreads(8))
        assert [episode.reward.value for episode in episodes] == [None, 1.0, 1.0]
