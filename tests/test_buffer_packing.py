"""Rows packed together and spread out again: across rows of any length, and with nonsense refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from palestra.server.types import SampleError, TokenSource, TrainingSample, TrajectoryGroup, VersionSpan
from palestra.server.wire import packing
from palestra.server.wire.codec import decode_group, encode_group
from palestra.server.wire.packing import Cursor, pack, unpack

S, P = TokenSource.SAMPLED, TokenSource.PROMPT


def row(name: str, length: int, *, seed: int = 0) -> TrainingSample:
    """A row whose sources change at random places; its last token is sampled, its first may be."""
    random = np.random.default_rng([seed, length])
    sources = np.where(np.cumsum(random.random(length) < 0.2) % 2, P, S).astype(np.uint8)
    sources[-1] = S
    sampled = sources == S
    return TrainingSample(
        rollout_id=name,
        attempt=0,
        group_id="g",
        task_id="t",
        branch=0,
        token_ids=random.integers(1000, size=length, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        sources=sources,
        logprobs=np.where(sampled, -random.random(length), np.nan).astype(np.float32),
        spans=(VersionSpan(0, 0, length),),
        temperature=1.0,
        reward=1.0,
        turn_rewards=(),
        stop_reason="answer",
    )


def check(rows: list[TrainingSample]) -> None:
    packed = pack(rows)
    for before, arrays, after in zip(rows, packed, unpack(packed), strict=True):
        assert arrays.token_ids.tolist() == before.token_ids.tolist()
        assert (arrays.lengths > 0).all(), "no run is empty"
        assert (arrays.kinds[1:] != arrays.kinds[:-1]).all(), "runs are as long as they can be"
        for name in ("loss_mask", "sources", "logprobs"):
            assert getattr(after, name).dtype == getattr(before, name).dtype
            assert getattr(after, name).tobytes() == getattr(before, name).tobytes()


@pytest.mark.parametrize("together", [1, 7, 16, 16_384])
def test_rows_are_told_apart_however_many_are_worked_on_together(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Neighbours of one kind, which only their row's end parts, are the case that matters."""
    monkeypatch.setattr(packing, "_TOGETHER", together)
    check([row(f"r{n}", length, seed=n) for n, length in enumerate((1, 5, 1, 1, 8, 3, 40, 2))])


def test_long_and_short_rows_in_one_group() -> None:
    rows = [row("a", 20_000), row("b", 9_000), row("c", 10), row("d", 7_374), row("e", 16_384)]
    check(rows)
    after = decode_group(encode_group(TrajectoryGroup("g", "t", 5, tuple(rows), {})))
    for a, b in zip(rows, after.samples, strict=True):
        for field in ("token_ids", "loss_mask", "sources", "logprobs"):
            assert getattr(a, field).tobytes() == getattr(b, field).tobytes()


def test_no_rows_are_no_rows() -> None:
    assert pack([]) == []
    assert unpack([]) == []


def test_the_row_with_a_wrong_mask_is_named() -> None:
    odd = dataclasses.replace(row("odd", 4), loss_mask=np.array([0, 0, 0, 3], np.uint8))
    with pytest.raises(SampleError, match="row odd/0 branch 0"):
        pack([row("fine", 5), odd, row("fine too", 5)])


@pytest.mark.parametrize("change", [{"lengths": 1}, {"logprobs": 1}, {"token_ids": 1}])
def test_runs_that_do_not_fit_their_row_are_refused_even_where_the_whole_fits(change: dict[str, int]) -> None:
    """What one row lacks the next one has too much of: the sums of the group are right."""
    first, second = pack([row("a", 40), row("b", 40, seed=1)])
    ((name, count),) = change.items()
    joined = np.concatenate([getattr(first, name), getattr(second, name)])
    cut = len(getattr(first, name)) + count
    moved = [dataclasses.replace(first, **{name: joined[:cut]}), dataclasses.replace(second, **{name: joined[cut:]})]
    if name == "lengths":
        kinds = np.concatenate([first.kinds, second.kinds])
        moved = [
            dataclasses.replace(one, kinds=part) for one, part in zip(moved, (kinds[:cut], kinds[cut:]), strict=True)
        ]
    with pytest.raises(ValueError, match="runs"):
        unpack(moved)


def test_a_row_without_runs_and_a_run_of_less_than_nothing_are_refused() -> None:
    (arrays,) = pack([row("a", 40)])
    with pytest.raises(ValueError, match="runs"):
        unpack([dataclasses.replace(arrays, lengths=arrays.lengths[:0], kinds=arrays.kinds[:0])])
    lengths = arrays.lengths.copy()
    lengths[:2] = -1, lengths[:2].sum() + 1
    with pytest.raises(ValueError):
        unpack([dataclasses.replace(arrays, lengths=lengths)])


def test_a_cursor_aligns_and_ends() -> None:
    cursor = Cursor(bytes(range(24)), 1)
    assert cursor.take("u1", 3).tolist() == [8, 9, 10]
    assert cursor.take("<u2", 0).tolist() == []
    assert cursor.take("u1", 1).tolist() == [16]
    with pytest.raises(ValueError):
        cursor.take("u1", 1)
    with pytest.raises(ValueError):
        cursor.take("u1", -1)
