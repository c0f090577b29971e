"""The examples' agents against a scripted model: each solves its task, in whatever way it speaks to the endpoint."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.foreign import play_agent
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import AgentPlayer, player_of
from palestra.agents.python import PythonAgent
from palestra.agents.types import GroupAssignment, Limits, SamplingParams
from palestra.cli.config import load_config
from palestra.envs.registry import make_env
from palestra.envs.types import Episode, Message, StopReason
from tests.fakes.sessions import FakeSessions, failure, listening

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def call(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def solve(key: str, messages: Sequence[Message]) -> Message:
    """Calls the tool that the question needs, and says what it gave."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"The answer is {str(last['content']).removesuffix('.0')}."}
    words = str(last["content"]).rstrip("?").split()
    if words[0] == "How":
        _, _, target, _, value, source = words
        return call("convert", f'{{"value": {value}, "source": "{source}", "target": "{target}"}}')
    signs = {"plus": "+", "minus": "-", "times": "*"}
    expression = "".join(signs.get(word, word) for word in words[2:])
    return call("calculator", f'{{ "expression":"{expression}"}}')


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSessions]:
    with listening(FakeSessions(solve)) as sessions:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{sessions.base}/v1")
        monkeypatch.delenv("OPENAI_API_BASE", raising=False)
        monkeypatch.chdir(EXAMPLES.parent)
        yield sessions


def player(name: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[AgentPlayer, Any]:
    """The example's own player and a maker of its environment, from its own file."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    config = load_config(EXAMPLES / name / "run.toml", overrides)
    made = player_of(config.agent, SamplingParams(), Path("nowhere"))
    assert isinstance(made, AgentPlayer)
    return made, lambda: make_env(config.env.id, config.env.args)


def play(host: FakeSessions, made: tuple[AgentPlayer, Any], task: int = 0) -> Episode:
    return play_agent(made[1](), made[0].agent, host, host.handle(), Limits(deadline_s=60), task=task, seed=0)


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("function", ["run", "run_streaming"])
def test_the_graph_solves_sums_and_lengths(
    host: FakeSessions, monkeypatch: pytest.MonkeyPatch, function: str, task: int
) -> None:
    made = player("langgraph_agent", monkeypatch, f"--agent.entry=examples/langgraph_agent/agent.py:{function}")
    episode = play(host, made, task)
    assert (episode.reward.value, episode.turns, episode.error) == (1.0, 2, None)
    assert [message["role"] for message in episode.messages[-4:]] == ["user", "assistant", "tool", "assistant"]
    assert {bool(body.get("stream")) for _, body in host.requests} == {function == "run_streaming"}
    assert [tool["function"]["name"] for tool in host.requests[0][1]["tools"]] == ["calculator", "convert"]


def test_one_graph_tells_the_sessions_of_a_group_apart(host: FakeSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    first, make_environment = player("langgraph_agent", monkeypatch)
    together = threading.Barrier(3)

    def answer(key: str, messages: Sequence[Message]) -> Message:
        if messages[-1]["role"] == "tool":
            together.wait(30)  # all three are in the middle of their episodes
            return {"role": "assistant", "content": f"I am {key}"}
        return solve(key, messages)

    host.script = answer
    players = Players(make_environment, first)
    episodes = run_group(GroupAssignment("g", 3, 0, 0, 9), players, host, Limits(deadline_s=60), EpisodeThreads(8))
    assert [episode.messages[-1]["content"] for episode in episodes] == ["I am key-0", "I am key-1", "I am key-2"]
    assert {path for path, _ in host.requests} == {"/v1/chat/completions"}


def test_a_spent_budget_and_a_dead_engine_are_told_apart(host: FakeSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    made = player("langgraph_agent", monkeypatch)
    host.script = lambda key, messages: (400, failure("budget_exceeded", "8 turns are spent"))
    episode = play(host, made)
    assert (episode.stop_reason, episode.truncated, episode.reward.value) == (StopReason.MAX_TURNS, True, 0.0)
    host.script = lambda key, messages: (503, failure("engine_unavailable"))
    episode = play(host, made)
    assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)


def test_the_openai_loop_scores_itself(host: FakeSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = play(host, player("openai_agent", monkeypatch))
    assert (episode.reward.value, episode.turns) == (1.0, 2)
    assert episode.reward.components == {"valid_call": 1.0, "right_call": 1.0, "right_answer": 1.0}
    host.script = lambda key, messages: {"role": "assistant", "content": "seven"}
    assert play(host, player("openai_agent", monkeypatch)).reward.value == 0.0


def test_the_command_leaves_its_answer_in_a_file(host: FakeSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    made = player("command_agent", monkeypatch)
    episode = play(host, made)
    assert (episode.reward.value, episode.turns) == (1.0, 2)
    assert host.requests[0][0] == "/sessions/key-0/v1/chat/completions"
    host.script = lambda key, messages: (503, failure("engine_unavailable", "the engine died"))
    episode = play(host, made)
    assert '"exit_status": 1' in episode.reward.note
    assert "the engine died" in episode.reward.note


@pytest.mark.parametrize("program", ["solve.py"])
def test_the_command_needs_nothing_but_the_standard_library(program: str) -> None:
    imported = {
        line.split()[1].partition(".")[0]
        for line in (EXAMPLES / "command_agent" / program).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
    assert imported <= {*sys.stdlib_module_names}


ASYNC = """
from langchain_openai import ChatOpenAI
from palestra.agents.session import async_session_key

MODEL = ChatOpenAI(model="policy", api_key=async_session_key, max_retries=0)


async def run(messages):
    return str((await MODEL.ainvoke(messages)).text)
"""


def test_one_async_client_serves_all_sessions(host: FakeSessions, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ASYNC)
    host.script = lambda key, messages: {"role": "assistant", "content": f"I am {key}"}
    players = Players(lambda: make_env("palestra/Calculator-v0"), AgentPlayer(PythonAgent(f"{tmp_path}/mine.py:run")))
    for group in ("g", "h"):  # the second group finds the client and its connections as the first one left them
        given = GroupAssignment(group, 3, 0, 0, 9)
        sessions = FakeSessions(host.script, host.base)
        episodes = run_group(given, players, sessions, Limits(deadline_s=60), EpisodeThreads(8))
        assert [episode.messages[-1]["content"] for episode in episodes] == ["I am key-0", "I am key-1", "I am key-2"]
