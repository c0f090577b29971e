"""Built-in environments that call themselves deterministic are so across processes, whatever the seed of their hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from palestra.envs.checking.playing import Subject, play_script
from palestra.envs.checking.scripts import raw_call, say
from palestra.envs.checking.types import Untestable
from palestra.envs.registry import make_env
from palestra.envs.types import Message

ENVS: dict[str, dict[str, Any]] = {
    "palestra/Calculator-v0": {},
    "palestra/FunctionCalling-v0": {},
    "palestra/GuessTheNumber-v0": {},
    "palestra/Mastermind-v0": {},
    "palestra/Hangman-v0": {},
    "palestra/ServiceDesk-v0": {},
}
ODD: list[list[Message]] = [
    [
        say("What is it?"),
        say("guess 5"),
        say("guess ABCD"),
        raw_call("search", '{"query": "border"}'),
        say("e"),
        say("done."),
    ],
    [raw_call("calculator", '{"expression": "1+"}'), raw_call("nothing", "{"), say("")],
]


def played(env_id: str) -> str:
    """All that an environment says: to its oracle and to odd scripts, on a few tasks."""
    subject = Subject(env_id, ENVS[env_id], 3)
    said = []
    try:
        for task in subject.tasks:
            scripts = list(ODD)
            try:
                scripts.append(subject.oracle(task))
            except Untestable:
                said.append("no oracle")
            for script in scripts:
                episode = play_script(subject.env, script, task, seed=7)
                said += [str(episode.prompt), str(episode.messages)]
    finally:
        subject.close()
    return "\n".join(said)


def all_played() -> str:
    return "\n".join(f"{env_id}\n{played(env_id)}" for env_id in ENVS)


@pytest.mark.walk
def test_they_say_the_same_in_processes_with_other_hashes() -> None:
    program = "from tests.test_replay_envs import all_played; print(all_played())"
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**surroundings, "PYTHONHASHSEED": n}
        )
        for n in ("1", "2")
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    assert said[0] == said[1]
    assert len(said[0]) > 1000


@pytest.mark.parametrize("env_id", ENVS)
def test_they_say_so(env_id: str) -> None:
    env: Any = make_env(env_id, ENVS[env_id])
    assert env.unwrapped.deterministic is True
    env.close()


def test_what_asks_a_model_or_another_process_does_not() -> None:
    model = {"base_url": "http://127.0.0.1:9/v1", "model": "m"}
    for env_id, args in (("palestra/ServiceDesk-v0", {"user": model}), ("palestra/Negotiation-v0", {})):
        env: Any = make_env(env_id, args)
        assert env.unwrapped.deterministic is False
        env.close()
