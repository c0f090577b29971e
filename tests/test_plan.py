"""The plan's pure parts: order of tasks, admission, and the book of open groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.server.plan.admission import Load, capacity
from palestra.server.plan.book import GroupBook
from palestra.server.plan.order import TaskOrder
from palestra.server.store.types import SessionOutcome

FAULT = SessionOutcome(None, stop_reason="infra")
DONE = SessionOutcome(1.0, stop_reason="answer")


def room(load: Load, staleness: int, committed: int, published: int, last: int = 100, q: int = 4) -> int:
    return capacity(
        load,
        groups_per_step=q,
        staleness=staleness,
        committed_step=committed,
        published_step=published,
        last_step=last,
    )


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
