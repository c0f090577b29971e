"""Agents that are Python functions or classes: finding them, what they get, and what they may return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.agents.foreign import play_agent
from palestra.agents.python import PythonAgent, outcome_of
from palestra.agents.types import AgentError, Limits, Outcome
from palestra.envs.calculator import Calculator
from palestra.envs.types import Episode, StopReason, Task
from tests.fakes.sessions import FakeSessions

TASK = Task("What is 12 plus 30?", 42, "t")
SOURCE = """
import asyncio
from palestra.agents.session import current
from palestra.agents.types import Outcome
import beside

made = []

def everything(task, session_url, workspace, api_key, base_url, messages, tools, deadline_s):
    names = [tool["function"]["name"] for tool in tools]
    return Outcome(info={"got": [task.id, session_url, workspace.is_dir(), api_key, base_url, len(messages), names, deadline_s > 1]})

def nothing():
    return 0.5

def keywords(task, *others, more=3, **words):
    return Outcome(answer=" ".join(sorted(words)))

async def slow(api_key):
    await asyncio.sleep(0)
    return Outcome(answer=(await asyncio.create_task(inner())))

async def inner():
    return current().session.api_key

async def endless():
    await asyncio.Event().wait()

async def own_timeout():
    raise TimeoutError("mine")

class Whole:
    def __init__(self):
        made.append(self)

    def run(self, task, session_url, workspace):
        return Outcome(answer=str(len(made)))

class Needy:
    def __init__(self, model):
        pass

class Silent:
    pass

an_object = Whole()
a_number = 7

def unknown(task, temperature):
    pass

def only(task, /):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an agent's file in it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text(SOURCE)
    (tmp_path / "mine" / "beside.py").write_text("VALUE = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def play(entry: str, deadline_s: float = 20.0) -> Episode:
    host = FakeSessions()
    agent = PythonAgent(entry)
    return play_agent(Calculator(), agent, host, host.handle(), Limits(deadline_s=deadline_s), task=TASK, seed=0)


@pytest.mark.usefixtures("folder")
class TestWhatItGets:
    def test_a_function_gets_what_it_declares(self) -> None:
        note = play("mine/agent.py:everything").reward.note
        assert (
            '["t", "http://127.0.0.1:9/sessions/key-0/v1", true, "key-0", "http://127.0.0.1:9/v1", 2, ["calculator"], true]'
            in note
        )

    def test_nothing_is_fine_too(self) -> None:
        assert play("mine/agent.py:nothing").reward.value == 0.5

    def test_keywords_get_everything(self) -> None:
        answer = play("mine/agent.py:keywords").messages[-1]["content"]
        assert answer == "api_key base_url deadline_s messages session_url tools workspace"

    def test_a_class_is_made_once_and_serves_all(self) -> None:
        host, agent = FakeSessions(), PythonAgent("mine/agent.py:Whole")
        for index in range(2):
            episode = play_agent(Calculator(), agent, host, host.handle(index), Limits(), task=TASK, seed=0)
            assert episode.messages[-1]["content"] == "2"  # an_object is the other one

    def test_an_object_and_a_dotted_module(self) -> None:
        assert play("mine/agent.py:an_object").messages[-1]["content"] == "1"
        assert PythonAgent("tests.test_agents_python:module_level").run is not None

    def test_coroutines_and_their_tasks_have_the_context(self) -> None:
        assert play("mine/agent.py:slow").messages[-1]["content"] == "key-0"

    def test_a_coroutine_is_cancelled_at_the_deadline(self) -> None:
        episode = play("mine/agent.py:endless", deadline_s=0.2)
        assert (episode.stop_reason, episode.truncated, episode.reward.value) == (StopReason.DEADLINE, True, 0.0)

    def test_its_own_timeout_is_a_fault(self) -> None:
        episode = play("mine/agent.py:own_timeout")
        assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)


def module_level(task: Task) -> None:
    return None


@pytest.mark.usefixtures("folder")
class TestErrors:
    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ("agent", "write 'package.module:name'"),
            (":run", "write 'package.module:name'"),
            ("no_such_module_here:run", "there is no module 'no_such_module_here'"),
            ("palestra.agents.nothing:run", "there is no module 'palestra.agents.nothing'"),
            ("mine/other.py:run", r"mine/other\.py is no file"),
            ("mine/agent.py:runn", "has no 'runn'; it has .*everything"),
            ("mine/agent.py:unknown", "unknown parameter 'temperature'.*session_url"),
            ("mine/agent.py:only", "unknown parameter 'task'"),
            ("mine/agent.py:Needy", "could not be made without arguments.*model"),
            ("mine/agent.py:Silent", r"neither a function nor something with run\(task"),
            ("mine/agent.py:a_number", "is int: neither"),
            ("needs.py:run", "it imports 'a_package_that_nobody_has', which is not installed"),
            ("broken.py:run", "importing it failed: ZeroDivisionError"),
            ("syntax.py:run", "importing it failed: SyntaxError"),
        ],
    )
    def test_each_says_what_is_wrong(self, folder: Path, entry: str, said: str) -> None:
        (folder / "needs.py").write_text("import a_package_that_nobody_has\n")
        (folder / "broken.py").write_text("1 / 0\n")
        (folder / "syntax.py").write_text("def run(:\n")
        with pytest.raises(AgentError, match=said):
            PythonAgent(entry)


class TestOutcomes:
    @pytest.mark.parametrize(
        ("value", "outcome"),
        [
            (None, Outcome()),
            (True, Outcome(reward=1.0)),
            (3, Outcome(reward=3.0)),
            (0.5, Outcome(reward=0.5)),
            ("42", Outcome(answer="42")),
            ({"answer": "42", "info": {"a": 1}}, Outcome(answer="42", info={"a": 1})),
            (Outcome(reward=1.0), Outcome(reward=1.0)),
        ],
    )
    def test_what_may_be_returned(self, value: Any, outcome: Outcome) -> None:
        assert outcome_of(value, "m:f") == outcome

    @pytest.mark.parametrize(
        ("value", "said"), [([1], "returned list"), ({"rewrd": 1}, "'rewrd'; an outcome has reward")]
    )
    def test_anything_else_is_refused(self, value: Any, said: str) -> None:
        with pytest.raises(TypeError, match=said):
            outcome_of(value, "m:f")
