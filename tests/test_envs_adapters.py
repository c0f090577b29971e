"""Environments of others: OpenEnv servers over their sessions, our own host among them, and gem's."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.adapters.connection import Connection, session_url
from palestra.envs.adapters.openenv import OpenEnv, describe
from palestra.envs.calculator import Calculator, calls
from palestra.envs.registry import SCORED, make_env, register_builtin
from palestra.envs.types import EnvError, Episode, Message, StopReason, Task
from palestra.server.env_host.session import Session
from palestra.server.env_host.types import Served
from tests.conformance.env_suite import EnvSuite
from tests.env_hosts import Echo, EnvHostProcess, WsServer

register_builtin("palestra/OpenEnv-v0", "palestra.envs.adapters.openenv:OpenEnv")
register_builtin("palestra/Gem-v0", "palestra.envs.adapters.gem:Gem")
CALCULATOR = "palestra/Calculator-v0"


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def calculator_server() -> Iterator[str]:
    """Sessions as the environment host gives them, without its processes."""
    server = WsServer(lambda: Session(make_env(CALCULATOR), Served(CALCULATOR)))
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def echo() -> Iterator[WsServer]:
    server = WsServer(Echo)
    yield server
    server.stop()


class Solved(OpenEnv):
    """Of the calculator behind a server; what solves a task is known here."""

    def oracle(self, task: Task) -> list[Message]:
        own = Calculator()
        return own.oracle(own.tasks[task.meta["index"]])


gym.register("test/SolvedOverTheWire-v0", entry_point=Solved, additional_wrappers=SCORED)


class TestConformance(EnvSuite):
    """Our calculator behind a server of ours keeps the contract of a local environment."""

    env_id = "test/SolvedOverTheWire-v0"
    untested = frozenset({"box", "swapped"})
    """Answers stay at the server, and there is no box."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def of_server(cls, calculator_server: str) -> Iterator[None]:
        cls.args = {"url": calculator_server}
        yield
        cls.args = {}


def same(here: Episode, there: Episode) -> bool:
    """Equal but for their times and for what the task is called."""
    return dataclasses.replace(here, seconds=0.0, task_id="") == dataclasses.replace(there, seconds=0.0, task_id="")


SCRIPTS: dict[str, list[Message | str]] = {
    "answered": [calls("12+30"), "The answer is 42"],
    "two calls": [
        {**calls("1+1"), "tool_calls": [*calls("1+1")["tool_calls"], *calls("2*", call_id="b")["tool_calls"]]},
        "2",
    ],
    "wrong": ["x"],
    "cut": [calls("1+1")],
    "surrogate": ["half a pair: \ud800"],
}


class TestRoundTrip:
    @pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
    def test_an_episode_over_the_wire_is_the_episode_itself(
        self, calculator_server: str, script: list[Message | str]
    ) -> None:
        env = make_env("palestra/OpenEnv-v0", {"url": calculator_server})
        there, here = (
            play(one, ScriptedPolicy(script), Limits(max_turns=3), task=5, seed=1)
            for one in (env, make_env(CALCULATOR))
        )
        env.close()
        assert there.error is None
        assert same(there, here)

    def test_a_task_of_the_callers_travels_with_its_answer(self, calculator_server: str) -> None:
        task = Task("What is 12 plus 30?", 42, "mine", {"expression": "12+30"})
        env = make_env("palestra/OpenEnv-v0", {"url": calculator_server})
        there, here = (
            play(one, ScriptedPolicy(SCRIPTS["answered"]), Limits(), task=task, seed=1)
            for one in (env, make_env(CALCULATOR))
        )
        env.close()
        assert there.reward.value == 1.0
        assert (same(there, here), there.task_id) == (True, "mine")

    def test_an_agent_that_played_by_itself_is_scored_there(self, calculator_server: str) -> None:
        env = make_env("palestra/OpenEnv-v0", {"url": calculator_server})
        env.reset(options={"task": Task("What is 12 plus 30?", 42, "mine")})
        call, tool = calls("12+30"), {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "42"}
        info = env.unwrapped.grade([call, tool, say("42")])  # type: ignore[attr-defined]
        env.close()
        assert (info.reward.value, info.stop_reason, info.turn) == (1.0, StopReason.ANSWER, 2)

    @pytest.mark.walk
    def test_a_real_host(self) -> None:
        host = EnvHostProcess(CALCULATOR)
        try:
            env = make_env("palestra/OpenEnv-v0", {"url": host.url})
            assert env.action_space == make_env(CALCULATOR).action_space
            for script in SCRIPTS.values():
                there, here = (
                    play(one, ScriptedPolicy(script), Limits(max_turns=3), task=5, seed=1)
                    for one in (env, make_env(CALCULATOR))
                )
                assert same(there, here)
            env.close()
        finally:
            assert host.down() == 0


class TestOthersServers:
    def env(self, echo: WsServer, **more: Any) -> Any:
        return make_env("palestra/OpenEnv-v0", {"url": echo.url, "observation_key": "echoed_message", **more})

    def played(self, echo: WsServer, *script: str, turns: int = 8, **more: Any) -> Episode:
        env = self.env(echo, **more)
        try:
            return play(env, ScriptedPolicy(script), Limits(max_turns=turns), task=7, seed=3)
        finally:
            env.close()

    def test_a_text_goes_in_and_a_text_comes_out(self, echo: WsServer) -> None:
        episode = self.played(echo, "hello", "end")
        assert [message["content"] for message in episode.messages] == ["ready 7", "hello", "hello", "end", "end"]
        assert episode.step_rewards == (0.5, pytest.approx(0.3))
        assert episode.reward.value == pytest.approx(0.8)
        assert (episode.terminated, episode.stop_reason) == (True, StopReason.ENV_DONE)

    def test_the_whole_observation_is_shown_where_no_field_is_named(self, echo: WsServer) -> None:
        episode = self.played(echo, "end", observation_key=None)
        assert json.loads(episode.messages[0]["content"]) == {"echoed_message": "ready 7", "message_length": 7}

    def test_null_before_the_end_is_nothing_and_null_all_along_is_unknown(self, echo: WsServer) -> None:
        assert self.played(echo, "null", "hello", "unrewarded").step_rewards == (0.0, 0.5, 0.0)
        assert self.played(echo, "null", "unrewarded").reward.value is None
        assert self.played(echo, "null", turns=1).reward.value == 0.0

    def test_a_limit_of_ours_keeps_what_the_steps_gave(self, echo: WsServer) -> None:
        episode = self.played(echo, "hello", turns=2)
        assert (episode.truncated, episode.reward.value) == (True, 1.0)

    @pytest.mark.parametrize(
        ("text", "why"),
        [("boom", "boom"), ("leave", "ended the session"), ("nonsense", "the answer to 'step' is none")],
    )
    def test_a_fault_of_the_server_is_no_reward_and_the_next_episode_plays(
        self, echo: WsServer, text: str, why: str
    ) -> None:
        env = self.env(echo)
        episode = play(env, ScriptedPolicy([text]), Limits(), task=7, seed=3)
        assert (episode.stop_reason, episode.reward.value) == (StopReason.INFRA, None)
        assert why in str(episode.error)
        assert play(env, ScriptedPolicy(["end"]), Limits(), task=7, seed=3).error is None
        env.close()

    def test_an_action_of_several_fields_is_written_as_json(self, echo: WsServer) -> None:
        script = ["plain", "[1]", '{"text": "x"}', '{"message": "end"}']
        episode = self.played(echo, *script, action_key=None)
        told = [message["content"] for message in episode.messages if message["role"] == "user"][1:]
        assert ["must be a JSON object" in text for text in told] == [True, True, False, False]
        assert "Field required" in told[2]
        assert (told[3], episode.reward.value) == ("end", pytest.approx(0.3))

    def test_an_agent_that_played_by_itself_is_played_again(self, echo: WsServer) -> None:
        env = self.env(echo)
        env.reset(options={"task": 1})
        info = env.unwrapped.grade([say("hello"), {"role": "user", "content": "hello"}, say("end"), say("late")])
        env.close()
        assert info.reward.value == pytest.approx(0.8)

    def test_a_missing_field_and_a_wrong_seed_are_named(self, echo: WsServer) -> None:
        assert "echoed_message, message_length" in str(self.played(echo, "end", observation_key="text").error)
        env = self.env(echo)
        with pytest.raises(EnvError, match=r"meta\.seed"):
            env.reset(options={"task": Task("", id="t", meta={"seed": "x"})})
        env.close()

    def test_what_a_reset_is_told_besides_the_seed(self, echo: WsServer) -> None:
        env = self.env(echo)
        observation, _ = env.reset(options={"task": Task("", id="t", meta={"reset": {"seed": 99}})})
        env.close()
        assert observation[0]["content"] == "ready 99"

    def test_the_token_is_borne_and_servers_are_asked_once_what_they_are(self, echo: WsServer) -> None:
        env = self.env(echo, token="secret")
        before = len(echo.headers)
        assert echo.headers[-1]["Authorization"] == "Bearer secret"
        self.env(echo, token="secret")
        assert len(echo.headers) == before
        env.close()

    def test_a_server_that_is_not_there(self) -> None:
        with pytest.raises(EnvError, match=r"127\.0\.0\.1:9"):
            make_env("palestra/OpenEnv-v0", {"url": "http://127.0.0.1:9"})
        describe.cache_clear()

    def test_a_server_that_is_silent(self) -> None:
        class Silent(Echo):
            def answer(self, raw: bytes) -> bytes | None:
                return b'{"type": "state", "data": {}}' if b"state" in raw else b" " * (1 << 20)

        server = WsServer(Silent)
        connection = Connection(server.url, timeout_s=30)
        with pytest.raises(EnvError, match="is none"):
            connection.ask("reset")
        assert connection.ask("state") == {}
        connection.close()
        server.stop()
        with pytest.raises(EnvError):
            connection.ask("state")

    @pytest.mark.parametrize(
        ("url", "session"),
        [
            ("http://h:1", "ws://h:1/ws"),
            ("https://h/space/", "wss://h/space/ws"),
            ("ws://h:1/ws", "ws://h:1/ws"),
            ("http://h:1?x=1", "ws://h:1/ws?x=1"),
        ],
    )
    def test_urls(self, url: str, session: str) -> None:
        assert session_url(url) == session

    @pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", ""])
    def test_no_urls(self, url: str) -> None:
        with pytest.raises(ValueError, match="url must be"):
            session_url(url)


class Dice:
    """An environment of gem's kind: it draws from the process's generators, at its making too."""

    def __init__(self, sides: int = 6) -> None:
        self.sides = sides
        random.random()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        return f"Roll: {random.randint(1, self.sides)}", {"suffix": "Say go."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        rolled = f"{random.randint(1, self.sides)} {np.random.randint(1000)}"
        return rolled, 0.25, action == "stop", action in ("cut", "stop"), {"suffix": "Again?"}


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gem")
    module.make = lambda env_id, **args: Dice(**args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gem", module)


@pytest.mark.usefixtures("dice")
class TestGem:
    def test_its_episodes(self) -> None:
        env = make_env("palestra/Gem-v0", {"env_id": "dice", "args": {"sides": 100}})
        first = play(env, ScriptedPolicy(["go", "stop"]), Limits(), task=3, seed=0)
        assert first.error is None
        assert first.messages[0]["content"].endswith("\nSay go.")
        assert (first.step_rewards, first.reward.value, first.terminated) == ((0.25, 0.25), 0.5, True)
        assert play(env, ScriptedPolicy(["go", "stop"]), Limits(), task=3, seed=9).messages == first.messages
        assert play(env, ScriptedPolicy(["go", "stop"]), Limits(), task=4, seed=0).messages != first.messages
        cut = play(env, ScriptedPolicy(["cut"]), Limits(), task=3, seed=0)
        assert (cut.truncated, cut.stop_reason, cut.reward.value) == (True, StopReason.MAX_TURNS, 0.25)

    def test_what_others_draw_meanwhile_changes_nothing_and_neither_does_it_for_them(self) -> None:
        def episode(disturb: bool) -> list[Any]:
            env, other = (make_env("palestra/Gem-v0", {"args": {"sides": 1000}}) for _ in range(2))
            seen = [env.reset(options={"task": 5})[0]]
            for _ in range(5):
                if disturb:
                    random.seed(random.random())
                    other.reset()
                    other.step(say("go"))
                seen.append(env.step(say("go"))[0])
            return seen

        assert episode(disturb=True) == episode(disturb=False)
        random.seed(1)
        np.random.seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        episode(disturb=False)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]

    def test_a_player_by_itself_is_played_again(self) -> None:
        env = make_env("palestra/Gem-v0")
        env.reset(options={"task": 1})
        info = env.unwrapped.grade([say("go"), say("stop"), say("late")])  # type: ignore[attr-defined]
        assert info.reward.value == 0.5


def test_without_gem_it_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(EnvError, match="pip install --no-deps gem-llm"):
        make_env("palestra/Gem-v0")


@pytest.mark.full  # gem-llm is installed by `./test.sh --full`, without its pins, which clash with ours
def test_a_real_game_of_gem_is_won_and_repeats() -> None:
    env = make_env("palestra/Gem-v0")
    env.reset(options={"task": 3})
    number = env.unwrapped._gem.unwrapped.game_number  # type: ignore[attr-defined]
    won, again = (play(env, ScriptedPolicy([rf"\boxed{{{number}}}"]), Limits(), task=3, seed=seed) for seed in (0, 1))
    assert (won.reward.value, won.terminated) == (1.0, True)
    assert same(won, again)
    empty = play(env, ScriptedPolicy([""]), Limits(), task=3, seed=0)
    assert empty.terminated
    assert empty.reward.value is not None
    assert empty.reward.value <= 0
