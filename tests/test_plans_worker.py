"""A worker that plays as a plan says, against the real service on a fake engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palestra.agents.chat import ChatPolicy
from palestra.agents.group import Players
from palestra.agents.plans.driver import PlanDriver
from palestra.agents.plans.history import History
from palestra.agents.plans.plan import PlayGroup, RolloutPlan
from palestra.agents.players import PolicyPlayer
from palestra.agents.types import GroupAssignment, Limits, ReviewRequest, SamplingParams, Verdict
from palestra.cli.roles.plays.groups import GroupWorker
from palestra.envs.types import Task
from tests.live import wait_for
from tests.plans import TASKS, Scene, Talk, running, scene

pytestmark = pytest.mark.walk


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, program="plan") as made:
        yield made


def worker(played: Scene, plan: RolloutPlan, *, concurrency: int = 4) -> GroupWorker:
    plan.history = History()
    player = PolicyPlayer(lambda handle: ChatPolicy(handle, SamplingParams(max_tokens=96)))
    return GroupWorker(
        played.service,
        PlanDriver(plan, lambda: TASKS),
        Players(Talk, player),
        Limits(max_turns=1, deadline_s=20.0),
        group_size=2,
        concurrency=concurrency,
        deterministic=False,
        stopping=played.stopping,
    )


def started(played: Scene, plan: RolloutPlan, *, fails: bool = False, concurrency: int = 4) -> Any:
    made = worker(played, plan, concurrency=concurrency)

    def work() -> None:
        made.register()
        made.run()

    return running(work, played.stopping, fails=fails)


def test_a_plan_that_overrides_nothing_needs_no_review(played: Scene) -> None:
    with started(played, RolloutPlan()):
        groups = played.claim(2)
    assert [len(group.samples) for group in groups] == [2, 2]
    assert played.ledger().balanced


class Own(RolloutPlan):
    """Tasks of its own, one of which is refused; rewards of its own; groups in two stages."""

    def __init__(self) -> None:
        self.stages: list[tuple[int, ...]] = []
        self.seen: list[str] = []

    def tasks(self) -> Any:
        return numbers

    def accept(self, task: Task) -> bool | str:
        return "odd" if int(str(task.answer)) % 2 else True

    def run_group(self, assignment: GroupAssignment, play: PlayGroup) -> None:
        for index in assignment.rollouts:
            self.stages.append((index,))
            (episode,) = play(replace(assignment, indices=(index,)))
            self.seen.append(episode.task_id)

    def review(self, group: ReviewRequest) -> Verdict:
        assert isinstance(group.task, Task)
        if group.task.answer == 2:
            return Verdict(False, "too_easy")
        return Verdict(rewards={0: 5.0, 1: None})


def numbers() -> Iterator[Task]:
    yield from (Task(f"Say {number}.", number, f"n{number}") for number in range(100))


def test_a_plan_says_which_tasks_how_and_what_becomes_of_them(played: Scene) -> None:
    plan = Own()
    with started(played, plan):
        groups = played.claim(2)
        wait_for(lambda: played.dropped().get("dropped(filtered(too_easy))"), "the group that was reviewed away")
    assert {group.task_id for group in groups} == {"n0", "n4"}
    for group in groups:
        assert group.rewards == {f"{group.group_id}-0": 5.0}
    assert played.dropped()["dropped(filtered(odd))"] >= 2
    assert set(plan.stages) == {(0,), (1,)}
    assert {"n0", "n2", "n4"} <= set(plan.seen)
    assert not {"n1", "n3"} & set(plan.seen), "a refused task is never played"
    ledger = played.ledger()
    assert ledger.balanced, ledger.lines()
    assert any("too_easy" in reason for reason in ledger.discarded)


def test_weights_are_asked_for_again_as_results_come(tmp_path: Path) -> None:
    asked: list[list[float | None]] = []

    class Curriculum(RolloutPlan):
        reweigh_every = 1

        def weights(self) -> Sequence[float]:
            assert self.size is not None
            asked.append(self.history.means(self.size))
            return [float(index == len(asked) % 6) for index in range(6)]

    tasks = []
    with scene(tmp_path, program="plan", groups_per_step=1) as played, started(played, Curriculum()):
        for step in (1, 2, 3):
            (group,) = played.claim(1)
            tasks.append(group.task_id)
            wait_for(lambda step=step: len(asked) > step, "new weights")
            wait_for(lambda: played.live.service.plan.order.index(99) == len(asked) % 6, "their arrival")
            played.client.commit(step, f"step_{step}", [group.group_id], "trainer")
            played.publish(step)
    assert tasks == ["t1", "t2", "t3"]
    assert asked[0] == [None] * 6
    assert [mean is not None for mean in asked[2]] == [False, True, True, False, False, False]


def test_reviews_are_answered_while_all_places_play(played: Scene) -> None:
    """A slow group never keeps a ready one from the trainer."""
    go = threading.Event()

    class Slow(RolloutPlan):
        def run_group(self, assignment: GroupAssignment, play: PlayGroup) -> None:
            if assignment.group_id == "g000001":
                go.wait(20)
            play(assignment)

        def review(self, group: ReviewRequest) -> Verdict | None:
            return None

    try:
        with started(played, Slow(), concurrency=2):
            (group,) = played.claim(1)
            assert group.group_id == "g000000"
            go.set()
    finally:
        go.set()


@pytest.mark.parametrize("method", ["accept", "run_group", "review", "weights"])
def test_a_fault_of_the_plans_own_ends_the_worker_with_its_trace(played: Scene, method: str) -> None:
    def broken(self: RolloutPlan, *arguments: object) -> Any:
        raise ZeroDivisionError("mine")

    plan = type("Broken", (RolloutPlan,), {method: broken})()
    with started(played, plan, fails=True) as faults:
        wait_for(lambda: faults, "the fault", 20)
    (fault,) = faults
    assert isinstance(fault, ZeroDivisionError)
    assert fault.__traceback__ is not None
    names = []
    trace = fault.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-1] == "broken"


def test_a_mistaken_answer_ends_it_too(played: Scene) -> None:
    class Mistaken(RolloutPlan):
        def review(self, group: ReviewRequest) -> Any:
            return "yes"

    with started(played, Mistaken(), fails=True) as faults:
        wait_for(lambda: faults, "the fault", 20)
    assert "review gave str" in str(faults[0])
