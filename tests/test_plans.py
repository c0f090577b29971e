"""A plan of the user's: how it is found, what it is asked and what is said of an answer that cannot be used, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.plans.driver import PlanDriver
from palestra.agents.plans.history import History
from palestra.agents.plans.loading import load_function, load_plan
from palestra.agents.plans.plan import PlayGroup, RolloutPlan
from palestra.agents.plans.types import PlanError
from palestra.agents.types import GroupAssignment, PlayedRollout, ReviewRequest, Verdict
from palestra.cli.roles.plays.service import WorkerService
from palestra.envs.types import Episode, Task
from palestra.server.client import ServiceError

TASKS = tuple(Task(f"q{number}", number, f"t{number}") for number in range(4))


def driver(plan: RolloutPlan) -> PlanDriver:
    plan.history = History()
    return PlanDriver(plan, lambda: TASKS)


def assignment(task: Task | int = 0, **more: Any) -> GroupAssignment:
    return GroupAssignment("g1", 4, 0, task, 7, **more)


def rollout(index: int, reward: float | None, tokens: int = 10) -> PlayedRollout:
    return PlayedRollout(index, f"g1-{index}", 0, reward, {}, "answer", False, tokens, 1)


def request(*rewards: float | None, group: str = "g1", task: Task | int = 0) -> ReviewRequest:
    return ReviewRequest(group, task, tuple(rollout(index, reward) for index, reward in enumerate(rewards)))


class TestAPlanThatOverridesNothing:
    def test_costs_nothing(self) -> None:
        said = driver(RolloutPlan()).registration()
        assert (said.tasks, said.weights, said.reviews) == (4, None, False)

    def test_plays_what_it_is_given(self) -> None:
        asked, given = driver(RolloutPlan()), assignment(2)
        assert asked.resolve(given) is given
        assert asked.refusal(given) is None
        played: list[GroupAssignment] = []
        asked.run(given, lambda part: played.append(part) or [])
        assert played == [given]


class TestTasks:
    def test_of_the_plans_own_come_as_themselves(self) -> None:
        class Own(RolloutPlan):
            def tasks(self) -> Any:
                return [Task("mine", id="m")]

        asked = PlanDriver(Own(), lambda: pytest.fail("the environment was asked for its tasks"))
        assert asked.resolve(assignment(0)).task == Task("mine", id="m")
        assert asked.plan.size == 1

    def test_of_a_stream_have_no_number(self) -> None:
        class Endless(RolloutPlan):
            def tasks(self) -> Any:
                return numbers

        asked = driver(Endless())
        assert asked.registration().tasks is None
        assert asked.resolve(assignment(11)).task == Task("11", id="the plan's tasks:11")

    def test_weights_of_a_stream_are_refused(self) -> None:
        class Weighed(RolloutPlan):
            def tasks(self) -> Any:
                return numbers

            def weights(self) -> Sequence[float]:
                return [1.0]

        with pytest.raises(PlanError, match="a stream of tasks, which has no end"):
            driver(Weighed())


def numbers() -> Iterator[Task]:
    yield from (Task(str(number)) for number in range(1000))


class Accepting(RolloutPlan):
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[Task]()

    def accept(self, task: Task) -> Any:
        self.asked.append(task)
        return self.answer


class TestAccept:
    @pytest.mark.parametrize(
        ("answer", "reason"), [(True, None), (False, "not_accepted"), ("too_long", "too_long"), ("", "not_accepted")]
    )
    def test_says_why_a_task_is_refused(self, answer: Any, reason: str | None) -> None:
        asked = driver(Accepting(answer))
        assert asked.refusal(assignment(3)) == reason
        assert asked.plan.asked == [TASKS[3]]  # type: ignore[attr-defined]

    def test_is_not_asked_again_for_what_is_played_again(self) -> None:
        asked = driver(Accepting(False))
        assert asked.refusal(assignment(3, indices=(2,))) is None
        assert asked.refusal(assignment(3, replay=True)) is None

    def test_must_say_yes_or_no(self) -> None:
        with pytest.raises(PlanError, match="accept gave NoneType"):
            driver(Accepting(None)).refusal(assignment())


class TestRunGroup:
    class Halves(RolloutPlan):
        def run_group(self, assignment: GroupAssignment, play: PlayGroup) -> None:
            for part in ((0, 1), (2, 3)):
                play(replace(assignment, indices=part))

    def test_may_play_a_group_in_parts(self) -> None:
        parts: list[tuple[int, ...]] = []
        driver(self.Halves()).run(assignment(), lambda part: parts.append(part.rollouts) or [])
        assert parts == [(0, 1), (2, 3)]

    def test_must_play_every_rollout_once(self) -> None:
        with pytest.raises(PlanError, match=r"run_group played rollouts \[0, 1, 2, 3\].*each of \[1\] once"):
            driver(self.Halves()).run(assignment(indices=(1,)), lambda part: [])


class Reviewing(RolloutPlan):
    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, list[ReviewRequest]()

    def review(self, group: ReviewRequest) -> Any:
        self.asked.append(group)
        return self.answer


class TestReview:
    def test_sees_the_task_itself_and_is_asked_once(self) -> None:
        verdict = Verdict(False, "boring")
        asked = driver(Reviewing(verdict))
        assert asked.registration().reviews
        assert asked.review(request(1.0, 0.0, task=2)) == (verdict, False)
        assert asked.review(request(1.0, 0.0, task=2)) == (verdict, False)
        assert [one.task for one in asked.plan.asked] == [TASKS[2]]  # type: ignore[attr-defined]

    def test_none_keeps_the_group(self) -> None:
        assert driver(Reviewing(None)).review(request(1.0)) == (Verdict(), False)

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (True, "review gave bool"),
            (Verdict(rewards={5: 1.0}), "a reward to rollout 5, which group g1 does not have"),
            (Verdict(rewards={0: float("nan")}), "gave the reward nan"),
            (Verdict(rewards={0: "1"}), "gave the reward '1'"),  # type: ignore[dict-item]
        ],
    )
    def test_an_answer_that_is_no_verdict_is_refused(self, answer: Any, says: str) -> None:
        with pytest.raises(PlanError, match=says):
            driver(Reviewing(answer)).review(request(1.0))


class Curriculum(RolloutPlan):
    reweigh_every = 2

    def weights(self) -> list[float]:
        return [1.0 if mean is None else max(0.1, 1 - abs(2 * mean - 1)) for mean in self.history.means(self.size or 0)]


class TestCurriculum:
    def test_weights_follow_what_came_of_each_task(self) -> None:
        asked = driver(Curriculum())
        assert asked.registration().weights == (1.0,) * 4
        assert asked.registration().reviews, "results are needed"
        assert asked.review(request(1.0, 1.0, group="a", task=0)) == (Verdict(), False)
        assert asked.review(request(1.0, 0.0, None, group="b", task=1)) == (Verdict(), True)
        assert asked.registration().weights == (0.1, 1.0, 1.0, 1.0)

    def test_tasks_of_a_file_are_found_by_their_id(self) -> None:
        asked = driver(Curriculum())
        asked.review(request(0.0, task=TASKS[3]))
        assert asked.plan.history.means(4) == [None, None, None, 0.0]

    @pytest.mark.parametrize(
        ("weights", "says"),
        [
            ([1.0], "1 numbers for 4 tasks"),
            ([1, 1, 1, -1], "weights gave -1.0"),
            ([0, 0, 0, 0], "0 for every task"),
        ],
    )
    def test_weights_that_are_none_are_refused(self, weights: list[float], says: str) -> None:
        class Fixed(RolloutPlan):
            def weights(self) -> list[float]:
                return weights

        with pytest.raises(PlanError, match=says):
            driver(Fixed()).registration()


class TestHistory:
    def test_survives_a_kill_and_counts_no_group_twice(self, tmp_path: Path) -> None:
        path = tmp_path / "history.jsonl"
        history = History(path)
        history.add(3, "g1", [1.0, 0.0, None])
        history.add(3, "g1", [1.0, 0.0, None])
        history.add(3, "g2", [None])
        history.add(3, "g3", [1.0])
        with path.open("ab") as file:
            file.write(b'{"task": 3, "group": "g4", "rew')
        again = History(path)
        assert (again.groups, again.mean(3), again.mean(3, last=1), again.mean(0)) == (2, 0.75, 1.0, None)
        again.add(0, "g5", [0.5])
        assert [json.loads(line)["group"] for line in path.read_text().splitlines()] == ["g1", "g3", "g5"]
        assert again.of(3)[0].best == 1.0


class TestLoading:
    def write(self, folder: Path, text: str) -> str:
        path = folder / "mine.py"
        path.write_text(
            "from palestra.agents.plans.plan import RolloutPlan\nclass Mine(RolloutPlan):\n    pass\n" + text
        )
        return str(path)

    def test_a_class_or_an_object_of_a_file(self, tmp_path: Path) -> None:
        file = self.write(tmp_path, "made = Mine()\n")
        for name in ("Mine", "made"):
            plan = load_plan(f"{file}:{name}", tmp_path / "h.jsonl")
            assert (type(plan).__name__, plan.history.groups) == ("Mine", 0)
        assert type(load_plan(None)) is RolloutPlan

    @pytest.mark.parametrize(
        ("entry", "says"),
        [
            ("nowhere.at_all:Plan", "rollout.plan 'nowhere.at_all:Plan': there is no module 'nowhere'"),
            ("FILE:Other", "has no 'Other'; it has .*Mine"),
            ("FILE:number", "is int, no palestra.agents.plans.plan.RolloutPlan"),
            ("FILE:Needy", "could not be made without arguments"),
        ],
    )
    def test_a_plan_that_is_none(self, tmp_path: Path, entry: str, says: str) -> None:
        file = self.write(tmp_path, "number = 3\nclass Needy(RolloutPlan):\n    def __init__(self, x): ...\n")
        with pytest.raises(PlanError, match=says):
            load_plan(entry.replace("FILE", file))

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("def f(args, rollout_id, data_buffer, evaluation=False): ...", "is function, no coroutine function"),
            ("async def f(args, rollout_id): ...", "too many positional arguments: write async def"),
            ("async def f(args, rollout_id, data_buffer): ...", "got an unexpected keyword argument 'evaluation'"),
        ],
    )
    def test_a_function_that_cannot_be_called_like_that(self, tmp_path: Path, code: str, says: str) -> None:
        file = self.write(tmp_path, code)
        with pytest.raises(PlanError, match=says):
            load_function(f"{file}:f")

    def test_a_function(self, tmp_path: Path) -> None:
        file = self.write(tmp_path, "async def f(args, rollout_id, data_buffer, evaluation=False): ...")
        assert load_function(f"{file}:f").__name__ == "f"


def test_an_episode_list_is_what_a_plan_gets_back_from_play() -> None:
    """So that a plan of several stages can look at the first one."""
    seen: list[list[Episode]] = []

    class Looking(RolloutPlan):
        def run_group(self, assignment: GroupAssignment, play: PlayGroup) -> None:
            seen.append(play(assignment))

    episodes: list[Any] = ["e"]
    driver(Looking()).run(assignment(), lambda part: episodes)
    assert seen == [episodes]


class TestPatience:
    class Client:
        def __init__(self, *faults: Exception | None) -> None:
            self.faults = list(faults)

        def work(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment:
            if (fault := self.faults.pop(0)) is not None:
                raise fault
            return assignment()

    def test_a_service_that_is_away_for_a_while_is_asked_again(self) -> None:
        pauses: list[float] = []
        gone = ServiceError("connection refused")
        service = WorkerService(self.Client(gone, gone, None), "strict", pauses.append)  # type: ignore[arg-type]
        assert [service.ask(1.0) for _ in range(3)] == [None, None, assignment()]
        assert len(pauses) == 2

    def test_one_that_refuses_or_stays_away_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = WorkerService(self.Client(ServiceError("no", 401)), "strict", lambda s: None)  # type: ignore[arg-type]
        with pytest.raises(ServiceError, match="no"):
            refused.ask(1.0)
        monkeypatch.setattr("palestra.cli.roles.plays.service.PATIENCE_S", -1.0)
        gone = WorkerService(self.Client(ServiceError("gone")), "strict", lambda s: None)  # type: ignore[arg-type]
        with pytest.raises(ServiceError, match="gone"):
            gone.ask(1.0)
