"""Rows of rollouts as a batch has them, written as letters: p prompt, S sampled and trained, o observation, c a close, s shared with an
earlier row, x sampled but too old, u sampled but unscored, l sampled but cut by a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.server.types import SAMPLED_SOURCES, TokenSource, TrainingSample, TrajectoryGroup, VersionSpan

LETTERS = {
    "p": TokenSource.PROMPT,
    "S": TokenSource.SAMPLED,
    "o": TokenSource.OBSERVATION,
    "c": TokenSource.CLOSE,
    "s": TokenSource.SHARED,
    "x": TokenSource.STALE,
    "u": TokenSource.UNSCORED,
    "l": TokenSource.OVERLONG,
}


def row(
    rollout: str,
    letters: str,
    reward: float | None,
    *,
    group: str = "g",
    branch: int = 0,
    turns: Sequence[float | None] = (),
    ids: Sequence[int] | None = None,
) -> TrainingSample:
    """One row, a token per letter."""
    sources = np.array([LETTERS[letter] for letter in letters], dtype=np.uint8)
    sampled = np.isin(sources, [int(source) for source in SAMPLED_SOURCES])
    return TrainingSample(
        rollout_id=rollout,
        attempt=0,
        group_id=group,
        task_id=f"task of {group}",
        branch=branch,
        token_ids=np.arange(len(letters), dtype=np.int32) if ids is None else np.array(ids, dtype=np.int32),
        loss_mask=(sources == int(TokenSource.SAMPLED)).astype(np.uint8),
        sources=sources,
        logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        spans=(VersionSpan(0, 0, len(letters)),),
        temperature=1.0,
        reward=reward,
        turn_rewards=tuple(turns),
        stop_reason="answer",
    )


def group_of(rows: Sequence[TrainingSample]) -> TrajectoryGroup:
    """Rows of one group as the trainer claims them."""
    rewards = {each.rollout_id: each.reward for each in rows if each.reward is not None}
    return TrajectoryGroup(rows[0].group_id, rows[0].task_id, len(rewards), tuple(rows), rewards)
