"""Turns to rows: sources, masks, forks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.server.rows import group_of, trajectory_rows
from palestra.server.types import SampleError, TokenSource, VersionSpan
from tests.fakes.rollouts import trajectory, turn

P, S, OBS, CL, SH = (
    TokenSource.PROMPT,
    TokenSource.SAMPLED,
    TokenSource.OBSERVATION,
    TokenSource.CLOSE,
    TokenSource.SHARED,
)


def test_two_turns_make_one_row() -> None:
    rows = trajectory_rows(
        trajectory([turn(0, None, [1, 2], [10, 11], version=4), turn(1, 0, [9, 3, 4], [12], version=5, close_tokens=1)])
    )
    assert len(rows) == 1
    row = rows[0]
    assert row.token_ids.tolist() == [1, 2, 10, 11, 9, 3, 4, 12]
    assert row.sources.tolist() == [P, P, S, S, CL, OBS, OBS, S]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert np.isnan(row.logprobs).tolist() == [True, True, False, False, True, True, True, False]
    assert row.logprobs[2] == np.float32(-0.01)
    assert row.spans == (VersionSpan(4, 2, 4), VersionSpan(5, 7, 8))


def test_first_leaf_owns_the_shared_prefix() -> None:
    shared = turn(0, None, [1], [10])
    rows = trajectory_rows(trajectory([shared, turn(1, 0, [2], [11]), turn(2, 0, [3], [12])]))
    assert [row.sources.tolist() for row in rows] == [[P, S, OBS, S], [P, SH, OBS, S]]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 1]]
    assert [row.branch for row in rows] == [0, 1]
    assert np.isfinite(rows[1].logprobs[1]), "the shared token keeps its logprob"


def test_identical_prompts_are_siblings() -> None:
    rows = trajectory_rows(trajectory([turn(0, None, [1], [10]), turn(1, None, [1], [11, 12])]))
    assert [row.token_ids.tolist() for row in rows] == [[1, 10], [1, 11, 12]]
    assert all(row.loss_mask[1:].all() for row in rows)


def test_undelivered_turn_is_left_out_and_its_retry_is_trained() -> None:
    lost = turn(1, 0, [2], [99], delivered=False)
    rows = trajectory_rows(trajectory([turn(0, None, [1], [10]), lost, turn(2, 0, [2], [11])]))
    assert [row.token_ids.tolist() for row in rows] == [[1, 10, 2, 11]]


def test_nothing_delivered_gives_no_row() -> None:
    assert trajectory_rows(trajectory([turn(0, None, [1], [10], delivered=False)])) == ()


def test_child_of_an_undelivered_turn_is_refused() -> None:
    with pytest.raises(SampleError, match="turn 1 extends turn 0"):
        trajectory_rows(trajectory([turn(0, None, [1], [10], delivered=False), turn(1, 0, [2], [11])]))


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_unknown_reward_trains_nothing(reward: float | None) -> None:
    (row,) = trajectory_rows(trajectory([turn(0, None, [1], [10, 11])], reward=reward))
    assert row.reward is None
    assert row.sources.tolist() == [P, TokenSource.UNSCORED, TokenSource.UNSCORED]
    assert not row.loss_mask.any()


def test_truncated_episode_is_masked_only_when_asked() -> None:
    cut = trajectory([turn(0, None, [1], [10])], truncated=True)
    assert trajectory_rows(cut)[0].loss_mask.tolist() == [0, 1]
    masked = trajectory_rows(cut, mask_truncated=True)[0]
    assert masked.sources.tolist() == [P, TokenSource.OVERLONG]
    assert masked.loss_mask.tolist() == [0, 0]
    assert trajectory_rows(trajectory([turn(0, None, [1], [10])]), mask_truncated=True)[0].loss_mask.tolist() == [0, 1]


def test_sampled_token_without_a_finite_logprob_is_refused() -> None:
    with pytest.raises(SampleError, match="finite logprob"):
        trajectory_rows(trajectory([turn(0, None, [1], [10], logprobs=np.array([np.nan], np.float32))]))


def test_sampled_token_without_a_version_is_refused() -> None:
    with pytest.raises(SampleError, match="policy version"):
        trajectory_rows(trajectory([turn(0, None, [1], [10, 11], spans=(VersionSpan(0, 0, 1),))]))


def test_two_temperatures_in_a_row_are_refused() -> None:
    with pytest.raises(SampleError, match=r"temperatures \[0.5, 1.0\]"):
        trajectory_rows(trajectory([turn(0, None, [1], [10]), turn(1, 0, [2], [11], temperature=0.5)]))


def experts(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int16).reshape(count, 1, 1)


@pytest.mark.parametrize("whole", [True, False])
def test_experts_cover_all_tokens_but_the_last(whole: bool) -> None:
    first = turn(0, None, [1, 2], [10], routed_experts=experts(0, 2))
    later = experts(0, 5) if whole else experts(2, 3)
    (row,) = trajectory_rows(trajectory([first, turn(1, 0, [3], [11, 12], routed_experts=later)]))
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_experts_missing_for_one_turn_are_missing_for_the_row() -> None:
    last = turn(1, 0, [3], [11, 12], routed_experts=experts(2, 3))
    (row,) = trajectory_rows(trajectory([turn(0, None, [1, 2], [10]), last]))
    assert row.routed_experts is None


def test_experts_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(SampleError, match="experts of 7 tokens"):
        trajectory_rows(trajectory([turn(0, None, [1, 2], [10], routed_experts=experts(0, 7))]))


def test_group_holds_each_scored_rollout_once() -> None:
    forked = trajectory([turn(0, None, [1], [10]), turn(1, None, [2], [11])], "forked", reward=0.5)
    broken = trajectory([turn(0, None, [1], [10])], "broken", reward=None)
    group = group_of("g0", "task", 3, [forked, broken, trajectory([], "empty", reward=1.0)])
    assert dict(group.rewards) == {"forked": 0.5}
    assert [row.rollout_id for row in group.samples] == ["forked", "forked", "broken"]
    with pytest.raises(SampleError, match="of group other"):
        group_of("g0", "task", 1, [trajectory([], group_id="other")])
