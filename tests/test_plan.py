"""The plan's pure parts: order of tasks, admission, and the book of open groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.server.plan.admission import capacity
from palestra.server.plan.book import GroupBook
from palestra.server.plan.budget import StepBudget
from palestra.server.plan.names import draw_of, name_of, owed
from palestra.server.plan.order import TaskOrder
from palestra.server.plan.types import Load, PlanSettings
from palestra.server.store.types import SessionOutcome

FAULT = SessionOutcome(None, stop_reason="infra")
DONE = SessionOutcome(1.0, stop_reason="answer")


def settings(**given: Any) -> PlanSettings:
    defaults: dict[str, Any] = {
        "groups_per_step": 4, "group_size": 2, "staleness": 0, "last_step": 100, "drop_zero_variance": True, "retries": 1, "seed": 0,
        "shuffle": False, "rollout_deadline_s": 60.0,
    }  # fmt: skip
    return PlanSettings(**{**defaults, **given})


def room(load: Load, staleness: int, committed: int, published: int, last: int = 100, q: int = 4, **more: Any) -> int:
    kept = settings(groups_per_step=q, staleness=staleness, last_step=last, **more)
    return capacity(load, kept, committed_step=committed, published_step=published)


def test_each_epoch_visits_every_task_once_and_is_reproducible() -> None:
    order, again = TaskOrder(7, shuffle=True, seed=3), TaskOrder(7, shuffle=True, seed=3)
    first, second = [order.index(i) for i in range(7)], [order.index(i) for i in range(7, 14)]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert [again.index(i) for i in reversed(range(14))] == [*first, *second][::-1]
    assert [TaskOrder(3, shuffle=False, seed=0).index(i) for i in range(5)] == [0, 1, 2, 0, 1]


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        TaskOrder(0, shuffle=True, seed=0)


def test_a_synchronous_run_opens_one_batch_and_waits_for_the_publish() -> None:
    assert room(Load(0, 0, 0), 0, 0, 0) == 4
    assert room(Load(1, 2, 0), 0, 0, 0) == 1
    assert room(Load(0, 0, 4), 0, 0, 0) == 0  # training
    assert room(Load(0, 0, 0), 0, 1, 0) == 0  # committed, not published
    assert room(Load(0, 0, 0), 0, 1, 1) == 4


def test_one_step_off_generates_while_it_trains() -> None:
    assert room(Load(0, 0, 4), 1, 0, 0) == 4
    assert room(Load(4, 0, 4), 1, 0, 0) == 0


def test_nothing_is_opened_that_no_step_will_train() -> None:
    assert room(Load(0, 0, 0), 3, 9, 9, last=10) == 4
    assert room(Load(0, 0, 0), 3, 10, 10, last=10) == 0


@given(st.integers(0, 5), st.integers(1, 5), st.lists(st.integers(0, 3), max_size=60))
def test_no_group_is_older_than_the_bound_when_it_is_trained(staleness: int, q: int, moves: list[int]) -> None:
    """Law 7, by simulation: whatever the order of events, a batch that is trained holds no group beyond the bound."""
    opened: list[int] = []  # the published step at each ready group's opening
    committed = published = 0
    for move in moves:
        if move == 0:
            for _ in range(room(Load(0, len(opened), 0), staleness, committed, published, q=q)):
                opened.append(published)
        elif move == 1 and len(opened) >= q:
            batch, opened = opened[:q], opened[q:]
            assert all(committed - step <= staleness for step in batch)
            committed += 1
        elif move == 2:
            published = committed


def test_a_fault_is_played_again_within_its_budget() -> None:
    book = GroupBook(retries=1)
    book.open("g", 0, 0, 2)
    first = book.take()
    assert first is not None
    assert (first.indices, first.attempt) == ((0, 1), 0)
    assert book.ended("g", 0, 0, FAULT) is None
    again = book.take()
    assert again is not None
    assert (again.indices, again.attempt) == ((0,), 1)
    assert book.ended("g", 0, 0, DONE) is None, "the old attempt no longer counts"
    assert book.ended("g", 1, 0, DONE) is None
    group = book.ended("g", 0, 1, FAULT)
    assert group is not None
    assert [slot.outcome for slot in group.slots] == [FAULT, DONE]


def test_ends_of_unknown_groups_and_second_ends_change_nothing() -> None:
    book = GroupBook(retries=0)
    book.open("g", 0, 0, 1)
    book.take()
    assert book.ended("nope", 0, 0, DONE) is None
    assert book.ended("g", 0, 0, DONE) is not None
    assert book.ended("g", 0, 0, FAULT) is None
    assert book.groups["g"].slots[0].outcome is DONE


def test_overdue_rollouts_are_those_that_were_handed_out() -> None:
    book = GroupBook(retries=0)
    book.open("g", 0, 0, 2)
    assert book.overdue(-1.0) == []
    book.take()
    assert book.overdue(-1.0) == [("g", 0, 0), ("g", 1, 0)]
    book.ended("g", 0, 0, DONE)
    assert book.overdue(-1.0) == [("g", 1, 0)]


def test_dropped_and_trained_groups_make_room_and_surplus_takes_it() -> None:
    more = {"ahead": 0, "oversample": 1.5}
    assert room(Load(0, 0, 0), 1, 0, 0, **more) == 6
    assert room(Load(0, 2, 4), 1, 0, 0, **more) == 0, "it trains"
    assert room(Load(0, 2, 0), 1, 1, 0, **more) == 0, "the weights are not out"
    assert room(Load(0, 2, 0), 1, 1, 1, **more) == 4


def test_rollouts_in_flight_bound_the_groups() -> None:
    assert room(Load(2, 0, 0, unfinished=3), 9, 0, 0, max_in_flight=8) == 2
    assert room(Load(2, 0, 0, unfinished=4), 9, 0, 0, max_in_flight=4) == 0
    assert room(Load(2, 0, 0, unfinished=9), 9, 0, 0, max_in_flight=4) == 0, "a bound that was lowered"


def test_weighted_draws_follow_the_weights_and_their_number() -> None:
    order = TaskOrder(3, shuffle=True, seed=5, weights=[0, 1, 3])
    drawn = [order.index(draw) for draw in range(2000)]
    assert 0 not in drawn
    assert 0.7 < drawn.count(2) / len(drawn) < 0.8
    assert drawn == [TaskOrder(3, shuffle=False, seed=5, weights=[0, 1, 3]).index(draw) for draw in range(2000)]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0], "1 weights for 3 tasks"),
        ([1.0, -1.0, 0.0], "weight of task 1 is -1.0"),
        ([1.0, float("nan"), 0.0], "task 1 is nan"),
        ([1.0, 1.0, float("inf")], "task 2 is inf"),
        ([0.0, 0.0, 0.0], "no task would ever be drawn"),
    ],
)
def test_weights_that_fit_no_tasks_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TaskOrder(3, shuffle=True, seed=0, weights=weights)


def test_a_source_without_an_end_has_no_weights_and_no_epochs() -> None:
    order = TaskOrder(None, shuffle=True, seed=0)
    assert [order.index(draw) for draw in (0, 7, 10**9)] == [0, 7, 10**9]
    with pytest.raises(ValueError, match="no end"):
        order.weigh([1.0])


def test_names_of_groups_and_what_is_owed() -> None:
    assert (name_of(7), name_of(7, 2), name_of(10**7)) == ("g000007", "g000007.2", "g10000000")
    assert draw_of("g000007.2") == (7, 2)
    assert [draw_of(name) for name in ("g7", "g000007.0", "g000007.", "x", "g000007-1")] == [None] * 5
    known = ["g000000", "g000001", "g000001.1", "g000002", "outside"]
    assert owed(["g000002", "g000001", "outside", "g000000"], known) == [(0, 1), (2, 1)]
    assert owed(["g000001.1"], known) == [(1, 2)]


def test_a_budget_is_spent_by_time_or_by_tokens() -> None:
    now = [5.0]
    budget = StepBudget(10.0, 100, lambda: now[0])
    assert not budget.spent, "no step has begun"
    budget.begin()
    now[0] += 9.0
    assert (budget.spent, budget.seconds_left) == (False, 1.0)
    budget.add(100)
    assert budget.spent
    budget.begin()
    assert not budget.spent
    now[0] += 10.0
    assert budget.spent
    free = StepBudget(None, None, lambda: now[0])
    free.begin()
    free.add(10**9)
    assert (free.spent, free.seconds_left) == (False, float("inf"))
