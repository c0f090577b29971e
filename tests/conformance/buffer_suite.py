"""What every Buffer keeps. Subclass `BufferSuite` and give a fixture `buffer` made with the suite's `clock`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from palestra.server.types import Buffer, LeaseLost, SampleError, TrajectoryGroup
from tests.fakes.rollouts import group


class Clock:
    """Unix seconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def ids(groups: list[TrajectoryGroup]) -> list[str]:
    return [group.group_id for group in groups]


class BufferSuite:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_ten_ready_and_a_claim_of_eight_leave_two_in_order(self, buffer: Buffer) -> None:
        names = [f"g{i}" for i in range(10)]
        assert buffer.put([group(name) for name in names]) == 10
        assert ids(buffer.claim(8, "t", 60)) == names[:8]
        assert ids(buffer.claim(8, "t", 60)) == names[8:]
        assert buffer.claim(8, "t", 60) == []

    def test_what_comes_out_is_what_went_in(self, buffer: Buffer) -> None:
        before = group("g", version=3, size=3, tokens=7)
        buffer.put([before])
        (after,) = buffer.claim(1, "t", 60)
        assert (after.group_id, after.task_id, after.group_size) == ("g", "task", 3)
        assert dict(after.rewards) == dict(before.rewards)
        for old, new in zip(before.samples, after.samples, strict=True):
            for field in dataclasses.fields(old):
                was, now = getattr(old, field.name), getattr(new, field.name)
                floats = isinstance(was, np.ndarray) and was.dtype.kind == "f"
                assert np.array_equal(was, now, equal_nan=True) if floats else np.array_equal(was, now), field.name

    def test_put_again_changes_nothing(self, buffer: Buffer) -> None:
        assert buffer.put([group("a"), group("a")]) == 1
        buffer.claim(1, "t", 60)
        assert buffer.put([group("a"), group("b")]) == 1
        assert ids(buffer.claim(9, "t", 60)) == ["b"]
        buffer.commit(1, "c1", ["a"], "t")
        assert buffer.put([group("a")]) == 0
        assert buffer.claim(9, "t", 60) == []

    def test_a_row_of_another_group_is_refused_and_nothing_is_kept(self, buffer: Buffer) -> None:
        wrong = dataclasses.replace(group("a"), group_id="b")
        with pytest.raises(SampleError):
            buffer.put([group("ok"), wrong])
        assert buffer.claim(9, "t", 60) == []

    def test_a_group_without_rows_is_refused(self, buffer: Buffer) -> None:
        with pytest.raises(SampleError):
            buffer.put([TrajectoryGroup("g", "task", 4, ())])

    def test_a_lease_that_ran_out_goes_to_the_next(self, buffer: Buffer, clock: Clock) -> None:
        buffer.put([group("a"), group("b")])
        assert ids(buffer.claim(2, "slow", 10)) == ["a", "b"]
        clock.now += 9
        assert buffer.claim(2, "next", 10) == []
        clock.now += 2
        assert ids(buffer.claim(1, "next", 10)) == ["a"]
        with pytest.raises(LeaseLost):
            buffer.commit(1, "c1", ["a", "b"], "slow")
        assert buffer.renew(["a", "b"], "slow", 10) == 1
        assert buffer.commit(1, "c1", ["a"], "next") == 1

    def test_renew_keeps_a_lease(self, buffer: Buffer, clock: Clock) -> None:
        buffer.put([group("a")])
        buffer.claim(1, "t", 10)
        clock.now += 9
        assert buffer.renew(["a", "unknown"], "t", 10) == 1
        assert buffer.renew(["a"], "other", 10) == 0
        clock.now += 9
        assert buffer.claim(1, "other", 10) == []

    def test_commit_is_all_or_none(self, buffer: Buffer) -> None:
        buffer.put([group("a"), group("b")])
        buffer.claim(1, "t", 60)
        with pytest.raises(LeaseLost):
            buffer.commit(1, "c1", ["a", "b"], "t")
        assert buffer.release(["a"], "t") == 1, "a was not marked"

    def test_a_second_commit_of_the_same_step_gives_the_count_again(self, buffer: Buffer) -> None:
        buffer.put([group("a"), group("b")])
        buffer.claim(2, "t", 60)
        assert buffer.commit(1, "c1", ["a", "b"], "t") == 2
        assert buffer.commit(1, "c1", ["b", "a"], "t") == 2
        with pytest.raises(LeaseLost):
            buffer.commit(2, "c2", ["a", "b"], "t")
        with pytest.raises(LeaseLost):
            buffer.commit(1, "c1", ["a", "b"], "other")

    def test_commit_of_an_unknown_group_is_refused(self, buffer: Buffer) -> None:
        with pytest.raises(LeaseLost):
            buffer.commit(1, "c1", ["nobody"], "t")

    def test_release_gives_back_the_old_order(self, buffer: Buffer) -> None:
        buffer.put([group(name) for name in "abc"])
        buffer.claim(2, "t", 60)
        assert buffer.release(["a", "b"], "other") == 0
        assert buffer.release(["b", "a"], "t") == 2
        assert buffer.release(["b", "a"], "t") == 0
        assert ids(buffer.claim(3, "t", 60)) == ["a", "b", "c"]

    def test_dropped_groups_never_come_back(self, buffer: Buffer) -> None:
        buffer.put([group(name) for name in "abc"])
        buffer.claim(1, "t", 60)
        assert buffer.drop(["a", "b", "unknown"], "why") == 2
        assert buffer.drop(["a", "b"], "again") == 0
        with pytest.raises(LeaseLost):
            buffer.commit(1, "c1", ["a"], "t")
        assert ids(buffer.claim(3, "t", 60)) == ["c"]
        assert buffer.commit(1, "c1", ["c"], "t") == 1
        assert buffer.drop(["c"], "late") == 0, "what was trained stays trained"

    def test_a_claim_of_nothing_takes_nothing(self, buffer: Buffer) -> None:
        buffer.put([group("a")])
        assert buffer.claim(0, "t", 60) == []
        assert buffer.claim(-1, "t", 60) == []
        assert ids(buffer.claim(1, "t", 60)) == ["a"]
