"""What a policy of age and size clears, and what it never does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palestra.server.buffer.retention import Retention, Shelf, shelves_of, unwanted
from palestra.server.buffer.types import GroupEntry
from palestra.server.types import GroupState

DAY = 86400.0


def shelves(*free_at: float | None) -> list[Shelf]:
    """Shelves s0, s1, ... of 10 bytes."""
    return [Shelf(f"s{i}", 10, at) for i, at in enumerate(free_at)]


def test_without_a_policy_all_that_is_free_goes_at_once() -> None:
    assert unwanted(shelves(5.0, None, 7.0), Retention(), 7.0) == ["s0", "s2"]


def test_age_counts_from_when_it_was_free() -> None:
    some = shelves(0.0, 50.0, None, 100.0)
    assert unwanted(some, Retention(keep_s=60), 100.0) == ["s0"]
    assert unwanted(some, Retention(keep_s=60), 110.0) == ["s0", "s1"]
    assert unwanted(some, Retention(keep_s=60), -DAY) == [], "a clock that was set back deletes nothing"


def test_size_takes_the_oldest_free_ones_until_all_fit() -> None:
    some = shelves(0.0, None, 0.0, 0.0)
    assert unwanted(some, Retention(DAY, 40), 1.0) == []
    assert unwanted(some, Retention(DAY, 39), 1.0) == ["s0"]
    assert unwanted(some, Retention(DAY, 20), 1.0) == ["s0", "s2"]
    assert unwanted(some, Retention(DAY, 0), 1.0) == ["s0", "s2", "s3"], "what is needed stays, whatever its size"


def test_what_age_takes_counts_for_the_size() -> None:
    assert unwanted(shelves(90.0, 0.0, 90.0), Retention(50, 20), 100.0) == ["s1"]


@given(
    st.lists(st.none() | st.floats(0, 100), max_size=8),
    st.floats(0, 200),
    st.none() | st.integers(0, 90),
    st.floats(0, 300),
)
def test_needed_arrays_stay_and_a_stricter_policy_takes_no_less(
    free_at: list[float | None], keep_s: float, keep_bytes: int | None, now: float
) -> None:
    some = shelves(*free_at)
    gone = unwanted(some, Retention(keep_s, keep_bytes), now)
    needed = {shelf.name for shelf in some if shelf.free_at is None}
    assert needed.isdisjoint(gone)
    assert set(gone) <= set(unwanted(some, Retention(), max(now, 100.0)))
    left = sum(shelf.bytes for shelf in some if shelf.name not in gone)
    assert keep_bytes is None or left <= max(keep_bytes, 10 * len(needed))


def entry(name: str, state: GroupState, step: int | None, shelf: str | None, free_at: float | None) -> GroupEntry:
    return GroupEntry(
        name, "t", 1, state, None, step, None, None, (0,), (), shelf=shelf, stored_bytes=7, free_at=free_at
    )


def test_a_shelf_is_free_with_the_last_group_on_it() -> None:
    entries = [
        entry("a", GroupState.COMMITTED, 1, "s1", 5.0),
        entry("b", GroupState.DROPPED, None, "s1", 9.0),
        entry("c", GroupState.COMMITTED, 2, "s2", None),
        entry("d", GroupState.COMMITTED, 3, "s3", None),
        entry("e", GroupState.CLAIMED, None, "s4", None),
        entry("f", GroupState.DROPPED, None, None, None),
    ]
    assert shelves_of(entries, 2, 20.0) == [
        Shelf("s1", 14, 9.0),
        Shelf("s2", 7, 20.0),
        Shelf("s3", 7, None),
        Shelf("s4", 7, None),
    ]
