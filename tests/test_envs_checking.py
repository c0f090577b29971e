"""The laws of environments: a sound one keeps them all, and each law finds the environment that breaks it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.envs.checking import LAWS, Report, Verdict, actions, call, check, processes, say
from palestra.envs.checking.playing import Subject
from palestra.envs.checking.run import PROCESSES, try_law
from palestra.envs.core import MessageEnv, Response
from palestra.envs.registry import make_env, register
from palestra.envs.spaces import Observation
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import EnvError, Message, Reward, StopReason, Task, ToolSpec


class Sound(ToolEnv):
    """Adds two numbers with a tool. Keeps every law."""

    system = "Use the tool, then reply with the number only."
    tasks: Any = tuple(
        Task(f"What is {a} plus {a + 1}?", 2 * a + 1, f"{a}", {"a": a, "b": a + 1}) for a in range(1, 40)
    )

    @tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        final = transcript[-1] if transcript else {}
        used = any(one.result == task.answer for one in self.calls)
        return float(used and str(final.get("content")).strip() == str(task.answer))

    def oracle(self, task: Task) -> list[Message]:
        return [call("add", **task.meta), say(str(task.answer))]


class Talking(MessageEnv):
    """Says a word back, in words alone."""

    tasks: Any = tuple(Task(f"Say w{number}.", f"w{number}", f"t{number}") for number in range(9))

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return float(bool(transcript) and transcript[-1].get("content") == task.answer)


class Moody(Sound):
    """Its first message depends on something that is no seed."""

    mood = 0

    def setup(self, task: Task) -> None:
        Moody.mood += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return (*observation, {"role": "user", "content": f"mood {self.mood}"}), info


class OneTask(Sound):
    """Draws the same task each time."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return super().reset(seed=seed, options=options or {"task": 0})


class Careless(Sound):
    """Takes any option."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return super().reset(seed=seed, options={"task": options["task"]} if options and "task" in options else {})


class SameIds(Sound):
    """Its tasks have one id."""

    tasks = tuple(Task(f"What is {a} plus 1?", a + 1, "same", {"a": a, "b": 1}) for a in range(9))


class Tuples(Sound):
    """Its answers do not survive JSON."""

    tasks = tuple(Task(f"What is {a} plus 1?", (a, 1), f"{a}", {"a": a, "b": 1}) for a in range(9))


class Sharing(Sound):
    """Hands out its own list."""

    def setup(self, task: Task) -> None:
        self.kept: list[Message] = []

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.kept += observation
        return observation, reward, terminated, truncated, info

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return 0.0 if any(message.get("role") != "tool" for message in self.kept) else super().score(task, transcript)


class Slow(Sound):
    """Builds its tasks each time."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.tasks = tuple(sorted(self.tasks * 60, key=lambda task: json.dumps(task.meta)))[:39]


class Wordless(Sound):
    """Its tool has no description."""

    @tool
    def add(self, a: int, b: int) -> int:
        return a + b


class BadSchema(Sound):
    """Its tool's schema is none."""

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        parameters = {"type": "object", "properties": {"a": {"type": "whole number"}}}
        return ({"type": "function", "function": {"name": "add", "description": "x", "parameters": parameters}},)


class Touchy(Sound):
    """Falls over an answer that is no text."""

    def respond(self, action: Message) -> Response:
        if action["content"] is None or isinstance(action["content"], list):
            raise TypeError("content must be text")
        return super().respond(action)


class Dropping(Sound):
    """Answers no call that went wrong."""

    def respond(self, action: Message) -> Response:
        response = super().respond(action)
        answers = [message for message in response.messages if not str(message["content"]).startswith("Error")]
        return Response(answers, response.stop)


class Runaway(Sound):
    """Takes its time with a long answer."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        started = time.thread_time()
        while len(str(transcript[-1].get("content"))) > 1000 and time.thread_time() < started + 0.1:
            continue
        return super().score(task, transcript)


class Generous(Sound):
    """Gives something for nothing."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return max(0.1, float(super().score(task, transcript)))  # type: ignore[arg-type]  # a float here


class Echoing(Talking):
    """Finds the answer anywhere in the text."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return float(task.answer in str(transcript[-1].get("content")) if transcript else 0.0)


class Mean(Sound):
    """Not even the oracle earns 1."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return 0.9 * float(super().score(task, transcript))  # type: ignore[arg-type]  # a float here


class Anything(Sound):
    """Any number after any call is right."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return float(bool(self.calls) and str(transcript[-1].get("content")).strip().isdecimal())


class Lottery(Sound):
    """Scores by chance."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return 1.0 - random.random() / 1e6 if super().score(task, transcript) else 0.0


class Cheating(Sound):
    """Its last step gives more than its record says."""

    def step(self, action: Message) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + 0.25 * terminated, terminated, truncated, info


class Breaking(Sound):
    """Its grader needs an answer."""

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        if not transcript or transcript[-1]["role"] != "assistant":
            raise IndexError("no answer")
        return super().score(task, transcript)


class Forgetful(MessageEnv):
    """Keeps what `respond` saw, and does not take in the conversation of an agent that played by itself."""

    tasks = Talking.tasks

    def setup(self, task: Task) -> None:
        self.said = ""

    def respond(self, action: Message) -> Response:
        self.said = str(action.get("content"))
        return Response(stop=StopReason.ANSWER)

    def score(self, task: Task, transcript: Sequence[Message]) -> float | Reward:
        return float(self.said == task.answer)

    def oracle(self, task: Task) -> list[Message]:
        return [say(task.answer)]


class Littering(Sound):
    """Starts a process per episode that goes into a session of its own, and stays."""

    def setup(self, task: Task) -> None:
        subprocess.Popen(["sleep", "300"], start_new_session=True)


class ForkShy(Sound):
    """Says who it is in a process of its own."""

    def setup(self, task: Task) -> None:
        self.number = os.getpid()

    @tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return (*observation, {"role": "user", "content": f"process {self.number}"}), info


class Box(Sound):
    """Runs code, and keeps the answer where the code can find it."""

    place: Path
    leaks = True

    def setup(self, task: Task) -> None:
        (self.place / "notes.txt").write_text(f"answer: {task.answer}" if self.leaks else "nothing")

    @tool
    def python(self, code: str) -> str:
        """Runs code."""
        # The real search would read this machine's folders; what is asked here is whether the law hears what is found.
        looking = code.replace(
            '"/workspace", "/tmp", "/dev/shm", "/home", "/root", "/run", "/var", "/etc", "/opt", "/srv", "/mnt"', ""
        )
        looking = looking.replace("os.getcwd(),", f"{str(self.place)!r},").replace('os.listdir("/proc")', '["self"]')
        done = subprocess.run(
            [sys.executable, "-I", "-c", looking], capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout + done.stderr

    tasks: Any = tuple(Task(f"Task {number}", f"the long answer of {number}", f"{number}") for number in range(4))


class Tight(Box):
    """Runs code, and keeps the answer to itself."""

    leaks = False


CLASSES: dict[str, type[MessageEnv]] = {
    made.__name__: made for made in globals().values() if isinstance(made, type) and issubclass(made, MessageEnv)
}
for name, made in CLASSES.items():
    if made.__module__ == __name__:
        register(f"checking/{name}-v0")(made)


def attempt(law: str, name: str, **args: Any) -> tuple[Verdict, str]:
    subject = Subject(f"checking/{name}-v0", args)
    try:
        outcome = try_law(LAWS[law], subject)
    finally:
        subject.close()
    return outcome.verdict, outcome.detail


def test_a_sound_environment_keeps_every_law() -> None:
    report = check("checking/Sound-v0", processes=False)
    assert report.passed, report.text()
    assert [outcome.law for outcome in report.untested] == ["box"]
    assert {outcome.law for outcome in report.outcomes} == LAWS.keys() - PROCESSES
    assert report.scores == {"null": 0.0, "echo": 0.0, "oracle": 1.0}
    assert all(outcome.says for outcome in report.outcomes)
    assert (report.size, len(report.tasks)) == (39, 5)


@pytest.mark.parametrize(
    ("law", "name", "told"),
    [
        ("contract", "Moody", "reset"),
        ("seeds", "Moody", "mood"),
        ("seeds", "OneTask", "each time"),
        ("options", "Careless", "not refused"),
        ("tasks", "SameIds", "both called 'same'"),
        ("tasks", "Tuples", "travelled as JSON"),
        ("objects", "Sharing", "scored another way"),
        ("cost", "Slow", "once per process"),
        ("schemas", "Wordless", "docstring"),
        ("schemas", "BadSchema", "whole number"),
        ("messages", "Touchy", "content must be text"),
        ("arguments", "Dropping", "0 answers"),
        ("null", "Generous", "empty answers earn 0.1"),
        ("echo", "Echoing", "its own prompt earns 1"),
        ("oracle", "Mean", "earns 0.9"),
        ("swapped", "Anything", "earns 1"),
        ("twice", "Lottery", "scored"),
        ("sums", "Cheating", "the record says"),
        ("truncated", "Breaking", "no answer"),
        ("replayed", "Forgetful", "override `replay`"),
        ("null", "Breaking", None),
    ],
)
def test_each_law_finds_who_breaks_it(law: str, name: str, told: str | None) -> None:
    verdict, detail = attempt(law, name)
    assert (verdict is Verdict.FAILED) == (told is not None), detail
    assert told is None or told in detail


def test_a_pattern_that_runs_away_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "LONG_S", 0.05)
    verdict, detail = attempt("lengths", "Runaway")
    assert verdict is Verdict.FAILED
    assert "processor time" in detail


def test_the_others_of_a_broken_environment_are_tried() -> None:
    report = check("checking/Generous-v0", processes=False)
    assert {outcome.law for outcome in report.failed} == {"null", "echo", "lengths"}
    assert not report.passed
    assert "empty answers earn 0.1" in report.text()
    assert json.loads(json.dumps(report.to_json()))["passed"] is False


def test_laws_that_need_an_oracle_say_so() -> None:
    report = check("checking/Talking-v0", processes=False)
    assert report.passed, report.text()
    without = {outcome.law for outcome in report.untested if outcome.detail == "the environment has no oracle"}
    assert without == {"oracle", "swapped", "twice", "replayed"}
    assert "oracle" not in report.scores


def test_an_environment_may_be_excused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLASSES["Generous"], "excused", {"null": "it is Christmas"}, raising=False)
    verdict, detail = attempt("null", "Generous")
    assert (verdict, detail) == (Verdict.UNTESTED, "excused: it is Christmas")
    assert attempt("echo", "Generous")[0] is Verdict.FAILED


def test_what_cannot_be_checked_at_all_is_said() -> None:
    with pytest.raises(EnvError, match="no environment"):
        check("checking/Nowhere-v0")
    with pytest.raises(EnvError, match="no tasks"):
        check("checking/Sound-v0", {"tasks": ()})
    with pytest.raises(EnvError, match="MessageEnv"):
        check("CartPole-v1")
    with pytest.raises(ValueError, match="no law is called 'nul'"):
        check("checking/Sound-v0", laws=["nul"])


def test_the_box_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Box, "place", tmp_path, raising=False)
    verdict, detail = attempt("box", "Box")
    assert verdict is Verdict.FAILED
    assert f"FOUND {tmp_path / 'notes.txt'}" in detail
    verdict, detail = attempt("box", "Tight")
    assert verdict is Verdict.PASSED, detail
    assert detail.startswith("searched ")


def test_scripts_are_assistant_messages() -> None:
    env = make_env("checking/Sound-v0")
    env.reset(options={"task": 3})
    observation, *_ = env.step(call("add", a=4, b=5))
    assert observation == ({"role": "tool", "tool_call_id": "call_1_0", "name": "add", "content": "9"},)
    *_, info = env.step(say("9"))
    assert info["step"].reward.value == 1.0


@pytest.mark.walk
def test_vectors_and_what_is_left_running() -> None:
    report = check("checking/Sound-v0", laws=sorted(PROCESSES))
    assert [outcome.verdict for outcome in report.outcomes] == [Verdict.PASSED] * 3, report.text()
    assert attempt("vectors", "ForkShy")[0] is Verdict.FAILED


@pytest.mark.walk
def test_what_is_left_running_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    before = sleepers()
    verdict, detail = attempt("killed", "Littering")
    assert (verdict, detail.splitlines()[0]) == (Verdict.FAILED, "left running:")
    assert "sleep 300" in detail
    assert sleepers() == before


def sleepers() -> int:
    """How many of the processes that `Littering` starts are there."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == b"sleep\x00300\x00"
        except OSError:
            continue
    return found


def test_the_report_is_equal_to_itself_whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    first: Report = check("checking/Sound-v0", laws=["null"])
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert check("checking/Sound-v0", laws=["null"]) == first
