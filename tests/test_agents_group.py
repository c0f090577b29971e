"""Groups: sessions, the leader, siblings that do not hurt each other, and threads that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from palestra.agents import group as group_module
from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.players import PolicyPlayer
from palestra.agents.scripted import ScriptedPolicy
from palestra.agents.types import GroupAssignment, Limits, Policy, PolicyReply, SessionHandle
from palestra.envs.calculator import Calculator, arithmetic_tasks, calls
from palestra.envs.types import Episode, Message, StopReason, Task, ToolSpec

TASK = Task("What is 12 plus 30?", 42, "t", {"expression": "12+30"})


@dataclass
class Host:
    """Keeps sessions in memory. `events` is what happened, in order."""

    fail_open: frozenset[int] = frozenset()
    fail_close: frozenset[int] = frozenset()
    events: list[tuple[str, int]] = field(default_factory=list)
    closed: dict[int, Episode] = field(default_factory=dict)
    task_ids: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, index: int) -> None:
        with self.lock:
            self.events.append((what, index))

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        if index in self.fail_open:
            raise ConnectionError("the service is away")
        self.note("open", index)
        self.task_ids.add(task_id)
        return SessionHandle(f"{assignment.group_id}/{index}", assignment.attempt, "http://host/v1", f"key-{index}")

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        index = index_of(handle)
        self.note("close", index)
        if index in self.fail_close:
            raise ConnectionError("the service went away")
        assert index not in self.closed, "closed twice"
        self.closed[index] = episode

    def conversation(self, handle: SessionHandle) -> list[list[Message]]:
        raise AssertionError("a policy's conversation is the environment's")


def index_of(handle: SessionHandle) -> int:
    return int(handle.rollout_id.rsplit("/", 1)[1])


def assignment(size: int = 4, task: Task | int = TASK, seed: int = 9) -> GroupAssignment:
    return GroupAssignment("g1", size, 0, task, seed)


def oracle(handle: SessionHandle) -> Policy:
    return ScriptedPolicy([calls("12+30"), "42"])


def run(
    host: Host,
    make_policy: Callable[[SessionHandle], Policy] = oracle,
    make_env: Callable[[], Any] = Calculator,
    limits: Limits | None = None,
    concurrency: int = 8,
    given: GroupAssignment | None = None,
) -> list[Episode]:
    players = Players(make_env, PolicyPlayer(make_policy))
    return run_group(given or assignment(), players, host, limits or Limits(), EpisodeThreads(concurrency))


class TestGroups:
    def test_every_rollout_is_opened_played_and_closed(self) -> None:
        host = Host()
        episodes = run(host)
        assert [episode.reward.value for episode in episodes] == [1.0] * 4
        assert host.closed == dict(enumerate(episodes))
        assert host.task_ids == {"t"}

    def test_all_have_the_same_task_and_first_observation(self) -> None:
        episodes = run(Host(), given=assignment(task=17))
        assert {episode.task_id for episode in episodes} == {arithmetic_tasks()[17].id}
        assert len({str(episode.messages[:6]) for episode in episodes}) == 1

    def test_one_rollout_is_a_group_too(self) -> None:
        assert len(run(Host(), given=assignment(size=1))) == 1

    def test_fewer_threads_than_rollouts_are_enough(self) -> None:
        assert [episode.reward.value for episode in run(Host(), concurrency=1)] == [1.0] * 4

    def test_the_leader_goes_ahead_until_its_first_reply(self) -> None:
        host, together = Host(), threading.Barrier(4)

        class Waiting:
            """The first reply notes who gave it; the second waits for all, so the followers must run beside the
            leader.
            """

            def __init__(self, index: int) -> None:
                self.index, self.turn = index, 0

            def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
                self.turn += 1
                if self.turn == 1:
                    host.note("reply", self.index)
                    return PolicyReply(calls("12+30"), "tool_calls")
                together.wait(20)
                return PolicyReply({"role": "assistant", "content": "42"}, "stop")

        episodes = run(host, lambda handle: Waiting(index_of(handle)))
        assert [episode.reward.value for episode in episodes] == [1.0] * 4
        assert host.events[:2] == [("open", 0), ("reply", 0)]
        assert {event for event in host.events[2:] if event[0] == "open"} == {("open", 1), ("open", 2), ("open", 3)}

    def test_a_leader_that_fails_does_not_hold_the_others_up(self) -> None:
        def make_policy(handle: SessionHandle) -> Policy:
            if index_of(handle) == 0:
                raise RuntimeError("no policy for the leader")
            return oracle(handle)

        host = Host()
        episodes = run(host, make_policy)
        assert [episode.reward.value for episode in episodes] == [None, 1.0, 1.0, 1.0]
        assert "no policy for the leader" in (episodes[0].error or "")
        assert set(host.closed) == {0, 1, 2, 3}


class TestFaults:
    def test_one_fault_leaves_its_siblings_alone(self) -> None:
        made = iter(range(4))

        def make_env() -> Calculator:
            if next(made) == 2:
                raise OSError("no box is left")
            return Calculator()

        host = Host()
        episodes = run(host, make_env=make_env)
        values = [episode.reward.value for episode in episodes]
        assert sorted(values, key=str) == [1.0, 1.0, 1.0, None]
        assert set(host.closed) == {0, 1, 2, 3}
        failed = next(episode for episode in episodes if episode.reward.value is None)
        assert (failed.task_id, failed.stop_reason) == ("t", StopReason.INFRA)
        assert "OSError: no box is left" in (failed.error or "")

    def test_a_session_that_cannot_be_opened(self) -> None:
        host = Host(fail_open=frozenset({1}))
        episodes = run(host)
        assert [episode.reward.value for episode in episodes] == [1.0, None, 1.0, 1.0]
        assert "the service is away" in (episodes[1].error or "")
        assert set(host.closed) == {0, 2, 3}

    def test_a_session_that_cannot_be_closed_has_no_reward(self) -> None:
        host = Host(fail_close=frozenset({3}))
        episodes = run(host)
        assert [episode.reward.value for episode in episodes] == [1.0, 1.0, 1.0, None]
        assert (episodes[3].turns, episodes[3].stop_reason) == (2, StopReason.INFRA)

    def test_environments_are_closed_and_one_that_cannot_be_is_no_fault(self) -> None:
        closed: list[int] = []

        class Closing(Calculator):
            def close(self) -> None:
                closed.append(1)
                raise OSError("already gone")

        assert [episode.reward.value for episode in run(Host(), make_env=Closing)] == [1.0] * 4
        assert len(closed) == 4

    def test_a_task_that_does_not_exist_closes_every_session(self) -> None:
        host = Host()
        episodes = run(host, given=assignment(task=10**7))
        assert {episode.reward.value for episode in episodes} == {None}
        assert host.task_ids == {"#10000000"}
        assert set(host.closed) == {0, 1, 2, 3}

    def test_an_episode_that_hangs_is_given_up_after_its_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_module, "GRACE_S", 0.2)
        release, woken = threading.Event(), threading.Event()

        class Hung:
            def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
                release.wait(60)
                woken.set()
                return PolicyReply({"role": "assistant", "content": "late"}, "stop")

        host = Host()
        threads = EpisodeThreads(2)
        players = Players(Calculator, PolicyPlayer(lambda handle: Hung() if index_of(handle) == 0 else oracle(handle)))
        episodes = run_group(assignment(), players, host, Limits(deadline_s=3.0), threads)
        assert [episode.reward.value for episode in episodes] == [None, 1.0, 1.0, 1.0]
        assert "did not end" in (episodes[0].error or "")
        assert host.closed[0] == episodes[0]
        free = run_group(assignment(size=2), Players(Calculator, PolicyPlayer(oracle)), Host(), Limits(), threads)
        assert len(free) == 2
        release.set()
        assert woken.wait(
            10
        )  # the late thread finds its session closed: a second close would fail the host's assertion

    def test_a_session_that_opens_too_late_is_closed_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_module, "GRACE_S", 0.2)
        release, closed = threading.Event(), threading.Event()

        class SlowHost(Host):
            def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
                release.wait(60)
                return super().open_session(assignment, index, task_id)

            def close_session(self, handle: SessionHandle, episode: Episode) -> None:
                super().close_session(handle, episode)
                closed.set()

        host = SlowHost()
        (episode,) = run(host, limits=Limits(deadline_s=0.1), given=assignment(size=1))
        assert (episode.reward.value, host.closed) == (None, {})
        release.set()
        assert closed.wait(10)
        assert host.closed == {0: episode}

    def test_a_rollout_without_a_thread_still_completes_its_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_module, "GRACE_S", 0.01)
        monkeypatch.setattr(group_module, "QUEUE_ROUNDS", 1)
        threads, release = EpisodeThreads(1), threading.Event()

        def hang() -> None:
            release.wait(60)

        threads.start(hang, "other", 1)
        host = Host()
        limits = Limits(deadline_s=0.05)
        episodes = run_group(assignment(size=2), Players(Calculator, PolicyPlayer(oracle)), host, limits, threads)
        release.set()
        assert [episode.reward.value for episode in episodes] == [None, None]
        assert "no free thread" in (episodes[0].error or "")
        assert set(host.closed) == {0, 1}

    def test_a_host_that_hangs_while_closing_is_not_waited_for_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_module, "GRACE_S", 0.2)
        release, woken = threading.Event(), threading.Event()

        class Slow(Host):
            def close_session(self, handle: SessionHandle, episode: Episode) -> None:
                release.wait(60)
                super().close_session(handle, episode)
                woken.set()

        host = Slow()
        (episode,) = run(host, limits=Limits(deadline_s=3.0), given=assignment(size=1))
        assert (episode.reward.value, host.closed) == (1.0, {})
        release.set()
        assert woken.wait(10)
        assert host.closed == {0: episode}


class TestThreads:
    def test_no_more_than_told_run_at_once(self) -> None:
        threads, lock, done = EpisodeThreads(3), threading.Lock(), threading.Semaphore(0)
        running = most = 0

        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            threading.Event().wait(0.01)
            with lock:
                running -= 1
            done.release()

        for _ in range(12):
            threads.start(work, "t", 20)
        for _ in range(12):
            assert done.acquire(timeout=20)
        assert most == 3

    def test_a_full_house_says_so(self) -> None:
        threads, release = EpisodeThreads(1), threading.Event()

        def hang() -> None:
            release.wait(60)

        give_back = threads.start(hang, "t", 1)
        with pytest.raises(TimeoutError, match="all 1 are playing"):
            threads.start(lambda: None, "t", 0.05)
        give_back()
        threads.start(lambda: None, "t", 1)
        release.set()
        with pytest.raises(ValueError, match="at least 1"):
            EpisodeThreads(0)


class TestPartOfAGroup:
    def test_only_the_named_rollouts_are_played_again(self) -> None:
        host = Host()
        episodes = run(host, given=GroupAssignment("g1", 4, 1, TASK, 9, indices=(2, 0)))
        assert len(episodes) == 2
        assert set(host.closed) == {0, 2}
