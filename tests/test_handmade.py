"""Masks made by hand, masks of age, and groups that somebody brings: law 2 holds for all of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.server.plan.handmade import check_on_record
from palestra.server.rows import group_of, mask_versions, rows_of_open, trajectory_rows, with_masks
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord
from palestra.server.types import SampleError, TokenSource, TrainingSample, TrajectoryGroup, VersionSpan
from tests.fakes.rollouts import trajectory, turn

FORKED = [
    turn(0, None, [1, 2], [10, 11], version=0),
    turn(1, 0, [3], [12], version=1),
    turn(2, 0, [4], [13], version=2),
]
"""Two rows: 1 2 10 11 3 12, and 1 2 10 11 4 13 whose first reply the other row trains."""


def test_a_mask_may_leave_out_but_not_put_in() -> None:
    rows = trajectory_rows(trajectory(FORKED))
    first, second = with_masks(rows, [[0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    assert first.loss_mask.tolist() == [0, 0, 1, 0, 0, 1]
    assert not second.loss_mask.any()
    assert (first.sources == rows[0].sources).all()


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ([[0] * 6], "1 masks for the 2 rows"),
        ([[0] * 6, [0] * 5], "branch 1: 5 entries for 6 tokens"),
        ([[0] * 6, [0, 0, 0, 0, 0, 2]], "branch 1: it must hold 0 and 1 alone"),
        ([[0] * 6, [0, 0, 0, 0, 0, 0.5]], "0 and 1 alone"),
        ([[1, 0, 0, 0, 0, 0], [0] * 6], "branch 0: 1 at 0, whose source is PROMPT"),
        ([[0, 0, 0, 0, 1, 0], [0] * 6], "1 at 4, whose source is OBSERVATION"),
        ([[0] * 6, [0, 0, 1, 0, 0, 0]], "branch 1: 1 at 2, whose source is SHARED"),
        ([], "0 masks"),
    ],
)
def test_a_mask_that_breaks_law_two_is_refused(masks: list[list[int]], said: str) -> None:
    with pytest.raises(SampleError, match=said):
        with_masks(trajectory_rows(trajectory(FORKED)), masks)


def test_an_open_rollout_s_rows_are_what_a_mask_speaks_of() -> None:
    rows = rows_of_open(trajectory(FORKED, reward=None))
    assert rows[0].loss_mask.tolist() == [0, 0, 1, 1, 0, 1]


def test_old_spans_are_masked_and_the_rest_stays() -> None:
    group = group_of("g0", "task", 1, [trajectory(FORKED)])
    masked, lengths = mask_versions(group, lambda version, newest: version < newest - 1)
    assert masked.samples[0].loss_mask.tolist() == [0, 0, 0, 0, 0, 1]
    assert masked.samples[0].sources.tolist()[2:4] == [TokenSource.STALE] * 2
    assert masked.samples[1] is group.samples[1], "its old tokens are trained elsewhere"
    assert lengths == [(6, 2)]
    assert mask_versions(group, lambda version, newest: False)[0] == group


def put_on_record(folder: Path, close: bool = True) -> None:
    """A log with one rollout of FORKED."""

    async def write() -> None:
        log = TurnLog(folder)
        await log.open_session(SessionRecord("r0", 0, "g0", "task", 0))
        for each in FORKED:
            await log.append_turn("r0", 0, each)
        if close:
            await log.close_session("r0", 0, SessionOutcome(1.0, stop_reason="answer"))
        await log.close()

    asyncio.run(write())


def check(folder: Path, group: TrajectoryGroup, **kept: Any) -> None:
    """Holds a group against the record."""

    async def whole() -> None:
        log = TurnLog(folder)
        try:
            check_on_record([group], log.reader)
        finally:
            await log.close()

    put_on_record(folder, **kept)
    asyncio.run(whole())


def changed(change: Callable[[TrainingSample], dict[str, Any]]) -> TrajectoryGroup:
    """The recorded group, but for something of its first row."""
    group = group_of("g0", "task", 1, [trajectory(FORKED)])
    first = dataclasses.replace(group.samples[0], **change(group.samples[0]))
    return dataclasses.replace(group, samples=(first, *group.samples[1:]))


def test_a_group_with_its_own_rewards_and_masks_is_taken(tmp_path: Path) -> None:
    check(tmp_path, changed(lambda row: {"reward": 0.25, "loss_mask": np.array([0, 0, 0, 1, 0, 0], np.uint8)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {"token_ids": row.token_ids + 1}, "its tokens are not those on record"),
        (lambda row: {"logprobs": row.logprobs + np.float32(0.5)}, "its logprobs are not those on record"),
        (lambda row: {"spans": (VersionSpan(7, 0, 6),)}, "its version spans are not those on record"),
        (
            lambda row: {
                "sources": np.full(6, TokenSource.SAMPLED, np.uint8),
                "logprobs": np.zeros(6, np.float32),
                "loss_mask": np.ones(6, np.uint8),
                "spans": (VersionSpan(0, 0, 6),),
            },
            "its sources say of another token that the engine sampled it",
        ),
        (lambda row: {"branch": 5}, "it has no branch 5"),
        (lambda row: {"rollout_id": "r9"}, "no closed session of that group"),
    ],
)
def test_a_group_that_says_anything_else_of_a_token_is_refused(
    tmp_path: Path, change: Callable[[TrainingSample], dict[str, Any]], said: str
) -> None:
    with pytest.raises(SampleError, match=said):
        check(tmp_path, changed(change))


def test_a_group_of_a_session_that_goes_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no closed session"):
        check(tmp_path, changed(lambda row: {}), close=False)
