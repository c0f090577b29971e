"""Rubrics: how components become one reward, what their faults cost, turns, and graders that are killed at their deadline."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.agents.play import play
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import Limits
from palestra.envs.core import MessageEnv, Response
from palestra.envs.rubrics import Rubric, Score, Scoring
from palestra.envs.rubrics import processes as grader_processes
from palestra.envs.rubrics.processes import close_workers, killable, worker_pids
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import tool
from palestra.envs.types import Message, StopReason, Task

ROOT = Path(__file__).resolve().parent.parent
TASK = Task("2 + 2?", "4", "t")


def say(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def scoring(*transcript: Message) -> Scoring:
    return Scoring(TASK, transcript)


def gives(value: Any) -> Any:
    return lambda scoring: value


def fails(scoring: Scoring) -> float:
    raise KeyError("no such key")


async def later(scoring: Scoring) -> float:
    await asyncio.sleep(0)
    return 0.5


class Callable:
    async def __call__(self, scoring: Scoring) -> Score:
        return Score(0.25, "by an object")


class TestScoring:
    @pytest.mark.parametrize(
        ("transcript", "answer"),
        [
            ((), ""),
            ((say("4"),), "4"),
            ((say(None),), ""),
            ((say([{"type": "text", "text": "4"}, {"type": "image"}, 7, {"type": "text"}]),), "4"),
            ((say("4", tool_calls=[{}]), {"role": "tool", "content": "5"}), ""),
            ((say("3"), {"role": "user", "content": "sure?"}, say("4", tool_calls=[])), "4"),
            (({"role": "user", "content": "4"},), ""),
        ],
    )
    def test_the_answer_is_the_final_assistant_message(self, transcript: tuple[Message, ...], answer: str) -> None:
        assert scoring(*transcript).answer == answer


class TestCombining:
    @pytest.mark.parametrize(("combine", "value"), [("sum", 2 * 0.5 - 0.25), ("product", 0.5 * 0.25), ("min", 0.25)])
    def test_weights_count_in_a_sum_and_a_metric_counts_nowhere(self, combine: Any, value: float) -> None:
        parts = {"a": (later, 2.0), "b": (Callable(), -1.0), "metric": (gives(0.0), 0.0)}
        reward = Rubric(parts, combine=combine).score(scoring())
        assert reward.value == pytest.approx(value)
        assert dict(reward.components) == {"a": 0.5, "b": 0.25, "metric": 0.0}
        assert (reward.note, dict(reward.errors)) == ("b: by an object", {})

    @pytest.mark.parametrize(
        "component",
        [
            gives(True),
            gives(1),
            gives(np.float32(1)),
            gives(np.bool_(True)),
            gives(Score(1.0)),
            functools.partial(lambda value, scoring: value, 1.0),
            lambda scoring: asyncio.sleep(0, 1.0),
            lambda scoring: asyncio.sleep(0, Score(1.0)),
        ],
    )
    def test_what_counts_as_a_number(self, component: Any) -> None:
        assert Rubric({"a": component}).score(scoring()).value == 1.0

    @pytest.mark.parametrize(
        ("component", "text"),
        [
            (fails, "KeyError: 'no such key'"),
            (gives(None), "no value"),
            (gives(math.nan), "it gave nan"),
            (gives(1.5), "outside of -1 to 1"),
            (gives(-math.inf), "outside of -1 to 1"),
            (gives("1"), "str, which is no number"),
            (gives([1.0]), "list, which is no number"),
            (gives(np.array([1.0, 2.0])), "no number"),
            (gives(Score(None, error="the judge is down")), "the judge is down"),
            (gives(Score(1.0, error="half done")), "half done"),
            (gives(Score(None, "unsure")), "unsure"),
            (lambda scoring: sys.exit(3), "SystemExit: 3"),
            (lambda scoring: 1 / 0, "ZeroDivisionError"),
            (lambda: 1.0, "TypeError"),
        ],
    )
    def test_a_fault_leaves_the_reward_unknown_and_is_told(self, component: Any, text: str) -> None:
        reward = Rubric({"good": gives(1.0), "bad": component}).score(scoring())
        assert reward.value is None
        assert dict(reward.components) == {"good": 1.0}
        assert set(reward.errors) == {"bad"}
        assert text in reward.errors["bad"]
        assert text in reward.note
        metric = Rubric({"good": gives(1.0), "bad": (component, 0.0)}).score(scoring())
        assert (metric.value, set(metric.errors)) == (1.0, {"bad"})

    def test_an_async_fault_does_not_end_the_loop(self) -> None:
        async def leaves(scoring: Scoring) -> float:
            raise SystemExit(1)

        async def cancels(scoring: Scoring) -> float:
            raise asyncio.CancelledError

        errors = Rubric({"leaves": leaves, "cancels": cancels}).score(scoring()).errors
        assert errors == {"leaves": "SystemExit: 1", "cancels": "it was cancelled from inside"}
        assert Rubric({"a": later}).score(scoring()).value == 0.5

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"components": {"a": 1}}, "cannot be called"),
            ({"components": {"a": (fails, math.nan)}}, "weight"),
            ({"components": {"a": fails}, "combine": "max"}, "combine"),
            ({"components": {"a": (fails, 0)}, "combine": "min"}, "weight is not 0"),
            ({"components": {}, "combine": "product"}, "weight is not 0"),
            ({"components": {"a": fails}, "timeout_s": 0}, "timeout_s"),
            ({"components": {"a": fails}, "bounds": (1, 1)}, "bounds"),
            ({"components": {"a": fails}, "per_turn": {"a": fails}}, "different names"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Rubric(**arguments)

    def test_no_components_give_nothing(self) -> None:
        assert Rubric({}).score(scoring()).value == 0.0


class TestWaiting:
    def test_components_overlap(self) -> None:
        """Each waits for the others: one after the other they would be late."""
        threads, tasks = threading.Barrier(3), asyncio.Barrier(3)

        def sync(scoring: Scoring) -> float:
            threads.wait(20)
            return 1.0

        async def coroutine(scoring: Scoring) -> float:
            async with asyncio.timeout(20):
                await tasks.wait()
            return 1.0

        parts = {f"{fn.__name__}{n}": fn for fn in (sync, coroutine) for n in range(3)}
        assert Rubric(parts).score(scoring()).value == 6.0

    def test_hung_components_are_left_behind_and_fill_no_pool(self) -> None:
        over = threading.Event()

        async def deaf(scoring: Scoring) -> float:
            while not over.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
            return 1.0

        hung = {f"hung{n}": lambda scoring: over.wait(60) for n in range(50)}
        try:
            reward = Rubric({**hung, "deaf": deaf, "good": gives(1.0)}, timeout_s=0.2).score(scoring())
            assert reward.value is None
            assert set(reward.errors.values()) == {"not done after 0.2 s"}
            assert len(reward.errors) == 51
            assert Rubric({"good": gives(1.0)}).score(scoring()).value == 1.0
        finally:
            over.set()

    async def test_a_rubric_can_be_awaited(self) -> None:
        rubric = Rubric({"a": later, "b": gives(0.5)})
        assert [reward.value for reward in await asyncio.gather(*[rubric.judge(scoring()) for _ in range(20)])] == [
            1.0
        ] * 20


class Polite(ToolEnv):
    """Answers until the policy says "stop"; each "please" is worth a tenth."""

    tasks = (TASK, Task("3?", "3", "u"))
    rubric = Rubric(
        {"right": lambda scoring: scoring.answer == "stop", "calls": (lambda scoring: len(scoring.calls) / 10, 0.0)},
        per_turn={
            "polite": (lambda scoring: "please" in str(scoring.transcript[-1]["content"]), 0.1),
            "called": (lambda scoring: bool(scoring.calls), 0.0),
        },
    )

    @tool
    def echo(self, text: str) -> str:
        """Says it again."""
        return text


def call(text: str) -> Message:
    function = {"name": "echo", "arguments": json.dumps({"text": text})}
    return say("", tool_calls=[{"id": "c", "type": "function", "function": function}])


class TestInAnEnvironment:
    def test_the_default_score_is_the_rubric_of_the_class_or_of_an_instance(self) -> None:
        class Plain(MessageEnv):
            tasks = (TASK,)

        class Ruled(Plain):
            rubric = Rubric({"right": lambda scoring: scoring.answer == scoring.task.answer})

        def reward(env: MessageEnv) -> Any:
            return play(env, ScriptedPolicy(["4"]), Limits(), task=0, seed=0).reward

        assert reward(Plain()).value == 0.0
        assert reward(Ruled()) == reward(Ruled())
        assert reward(Ruled()).value == 1.0
        other = Ruled()
        other.rubric = Rubric({"right": gives(0.5), "grader": (fails, 0.0)})
        assert (reward(other).value, set(reward(other).errors)) == (0.5, {"grader"})

    def test_turns_are_rewarded_where_they_happen(self) -> None:
        script = [call("please"), call("x"), say("stop")]
        episode = play(Polite(), ScriptedPolicy(script), Limits(), task=0, seed=0)
        assert episode.step_rewards == (0.1, 0.0, 0.0)
        assert episode.reward.value == pytest.approx(1.1)
        assert dict(episode.reward.components) == {"right": 1.0, "calls": 0.2, "polite": 1.0, "called": 3.0}

    def test_a_turn_that_cannot_be_judged_leaves_its_reward_unknown(self) -> None:
        def judge(scoring: Scoring) -> float:
            if scoring.answer == "second":
                raise RuntimeError("no verdict")
            return 0.1

        class Talk(MessageEnv):
            tasks = (TASK,)
            rubric = Rubric({}, per_turn={"kind": judge})

            def respond(self, action: Message) -> Response:
                stop = StopReason.ANSWER if action["content"] == "stop" else None
                return Response([] if stop else [{"role": "user", "content": "go on"}], stop, reward=0.5)

        episode = play(Talk(), ScriptedPolicy(["first", "second", "stop"]), Limits(), task=0, seed=0)
        assert episode.step_rewards == (0.6, None, 0.6)
        assert episode.reward.value is None
        assert episode.reward.errors == {"kind": "RuntimeError: no verdict"}
        assert episode.reward.note == "kind: RuntimeError: no verdict"
        assert episode.reward.components == {"kind": pytest.approx(0.2)}

    def test_an_agent_that_played_by_itself_is_judged_as_if_it_had_been_played(self) -> None:
        played = play(Polite(), ScriptedPolicy([call("please"), call("x"), say("stop")]), Limits(), task=0, seed=0)
        env = Polite()
        env.reset(options={"task": 0})
        info = env.grade(played.messages[1:])
        assert info.reward == played.reward
        assert info.turn == 3


@pytest.fixture
def workers() -> Iterator[None]:
    close_workers()
    yield
    close_workers()
    assert worker_pids() == []


CATASTROPHE = ("(a+)+$", "a" * 40 + "b")
"""A regex that runs for hours, and holds the interpreter's lock meanwhile."""


def gone(pids: list[int]) -> bool:
    """Whether processes ended, or will within a few seconds."""
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class TestKillable:
    def test_what_no_other_process_could_import_is_refused(self) -> None:
        def nested() -> int:
            return 1

        for function in (lambda: 1, nested):
            with pytest.raises(ValueError, match="top of a module"):
                killable(function)
        with pytest.raises(ValueError, match="same module"):
            killable(json.loads, warm=os.getpid)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout_s"):
            killable(json.loads, timeout_s=0)

    def test_a_long_text_is_refused_before_anything_starts(self) -> None:
        close_workers()
        loads = killable(json.loads, max_characters=10)
        assert loads("[" * 11) == Score(0.0, "a text of 11 characters is over the cap of 10")
        assert killable(len, max_characters=10)(scoring(say("x" * 11))).value == 0.0  # type: ignore[union-attr]
        assert worker_pids() == []

    def test_it_survives_a_fork(self) -> None:
        """The child forgets the workers and takes no lock of theirs."""
        pool = grader_processes._workers
        with pool._changed:
            child = os.fork()
            if child == 0:
                os._exit(0 if grader_processes._workers is not pool and worker_pids() == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @pytest.mark.walk
    def test_results_and_faults(self, workers: None) -> None:
        loads = killable(json.loads)
        assert loads('{"a": [1]}') == {"a": [1]}
        (pid,) = worker_pids()
        assert killable(os.getpid)() == pid  # the same worker serves another grader
        assert "JSONDecodeError" in str(loads("{").error)  # type: ignore[union-attr]
        assert "cannot be sent" in str(killable(threading.Lock)().error)  # type: ignore[union-attr]
        assert worker_pids() == [pid]
        assert "ended by itself (exit code 3)" in str(killable(os._exit)(3).error)  # type: ignore[union-attr]
        assert loads("1") == 1
        assert worker_pids() != [pid]
        assert "pickle" in str(killable(len)([lambda: 0]).error)  # type: ignore[union-attr]
        (idle,) = worker_pids()
        os.kill(idle, signal.SIGKILL)
        os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
        assert loads("2") == 2

    @pytest.mark.walk
    def test_a_forked_child_has_workers_of_its_own(self, workers: None) -> None:
        getpid = killable(os.getpid)
        ours = getpid()
        child = os.fork()
        if child == 0:
            theirs = getpid()
            os._exit(0 if isinstance(theirs, int) and theirs != ours else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert getpid() == ours

    @pytest.mark.walk
    def test_a_runaway_is_killed_at_its_deadline_and_the_others_go_on(self, workers: None) -> None:
        match = killable(re.fullmatch, timeout_s=0.5)
        rubric = Rubric({"hangs": lambda scoring: match(*CATASTROPHE)})
        reward = rubric.score(scoring())
        assert (reward.value, dict(reward.errors)) == (None, {"hangs": "fullmatch was killed after 0.5 s"})
        assert worker_pids() == []
        assert "MemoryError" in str(killable(bytes)(2**36).error)  # type: ignore[union-attr]
        loads = killable(json.loads)
        threads = [threading.Thread(target=lambda: got.append(loads("1"))) for _ in range(20)]
        got: list[Any] = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [1] * 20
        assert len(worker_pids()) <= grader_processes.MAX_WORKERS

    @pytest.mark.walk
    def test_nothing_is_left_when_the_interpreter_is_killed_in_a_computation(self) -> None:
        code = (
            "import os, re, threading, time\n"
            "from palestra.envs.rubrics.processes import killable, worker_pids\n"
            f"hang = lambda: killable(re.fullmatch, timeout_s=600)(*{CATASTROPHE!r})\n"
            "pid = killable(os.getpid)()\n"
            "ticks = lambda: int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[11])\n"
            "before = ticks()\n"
            "threading.Thread(target=hang, daemon=True).start()\n"
            "while ticks() < before + 20: time.sleep(0.01)\n"
            "print(*worker_pids(), flush=True)\n"
            "os.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
        assert done.returncode == -9
        pids = [int(pid) for pid in done.stdout.split()]
        assert pids
        assert gone(pids)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/envs/rubrics.md").read_text(), re.DOTALL)


class TestDocument:
    def test_the_first_example(self, capsys: pytest.CaptureFixture[str]) -> None:
        exec(blocks()[0], {"__name__": "example"})
        assert capsys.readouterr().out == "1.0 {'right': 1.0, 'short': 1.0}\n"

    @pytest.mark.walk
    def test_the_others(self, capsys: pytest.CaptureFixture[str], workers: None) -> None:
        for code in blocks()[1:]:
            exec(code, {"__name__": "example"})
        assert capsys.readouterr().out == "fullmatch was killed after 2 s\n"


def test_no_deadline_of_ours_is_a_signal() -> None:
    """Alarms reach a main thread alone, and get lost in callbacks."""
    found = [
        str(path)
        for package in ("sandbox", "envs", "agents", "server", "trainer", "cli")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"signal\.alarm|setitimer|SIGALRM", path.read_text())
    ]
    assert found == []
