"""Rows to rollouts and back: who takes part, what followed each of its turns, and which tokens a turn's advantage belongs to.

In: the rows of one batch. Out: `Rollouts`, which estimators work on, and one `RowAdvantage` per row. Pure; numpy only.

A rollout's turns are the runs of sampled tokens that its rows own, row by row; runs that another row trains (SHARED) are that row's. The
last turn's reward is completed by what the rollout's reward has beyond the sum of its turns: the final score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from palestra.server.types import SAMPLED_SOURCES, TokenSource, TrainingSample
from palestra.trainer.types import F32, F64, I64, Estimate, RowAdvantage, TrainerError

Rollout: TypeAlias = tuple[str, int]
"""rollout_id and attempt."""

_OWN = [int(source) for source in SAMPLED_SOURCES if source != TokenSource.SHARED]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of a batch that take part, a line each: those with a reward and at least one trained token."""

    lines: Mapping[Rollout, int]
    """The line of each rollout."""
    groups: I64
    """[N] a number per group."""
    returns: F64
    """[N, K] what followed turn k, discounted. Lines of fewer turns are filled up with their last value, so that a rollout that has ended
    is compared by how it ended. With K = 1, each rollout's reward."""
    runs: Mapping[Rollout, int]
    """Turns of each rollout whose turns are told apart; the others, and all where nobody asked, have their reward for every token."""


def taking_part(rows: Sequence[TrainingSample]) -> dict[Rollout, list[TrainingSample]]:
    """The rows of each rollout that has a reward and at least one trained token in some row, in the rows' order.

    Raises:
        TrainerError: rows of one rollout disagree about its reward or its group.
    """
    found: dict[Rollout, list[TrainingSample]] = {}
    for row in rows:
        found.setdefault((row.rollout_id, row.attempt), []).append(row)
    for (name, _), own in found.items():
        first = (own[0].group_id, own[0].reward)
        for row in own:
            if (row.group_id, row.reward) != first:
                raise TrainerError(f"rows of rollout {name} disagree: {first} and {(row.group_id, row.reward)}")
    return {
        rollout: own
        for rollout, own in found.items()
        if own[0].reward is not None and any(row.loss_mask[1:].any() for row in own)
    }


def rollouts_of(rows: Sequence[TrainingSample], turn_discount: float | None = None) -> Rollouts:
    """The batch as estimators see it; with `turn_discount`, by turns.

    Raises:
        TrainerError: as `taking_part`.
    """
    parts = taking_part(rows)
    names = {group: number for number, group in enumerate(dict.fromkeys(own[0].group_id for own in parts.values()))}
    returns: list[list[float]] = []
    runs: dict[Rollout, int] = {}
    for rollout, own in parts.items():
        given = None if turn_discount is None else _turn_rewards(own)
        if given is None or turn_discount is None:
            returns.append([_reward(own)])
        else:
            returns.append(returns_to_go(given, turn_discount))
            runs[rollout] = len(given)
    longest = max(map(len, returns), default=1)
    return Rollouts(
        lines={rollout: line for line, rollout in enumerate(parts)},
        groups=np.array([names[own[0].group_id] for own in parts.values()], dtype=np.int64),
        returns=np.array([[*each, *each[-1:] * (longest - len(each))] for each in returns], dtype=np.float64).reshape(
            -1, longest
        ),
        runs=runs,
    )


def returns_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """Of each turn: its reward, and `discount` times what follows it (Sutton and Barto, "Reinforcement Learning", section 3.3)."""
    out: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        out.append(later)
    return out[::-1]


def row_advantages(rows: Sequence[TrainingSample], rollouts: Rollouts, estimate: Estimate) -> list[RowAdvantage | None]:
    """The advantage of each row; None where its rollout takes no part. Baseline and deviation are those of the first turn."""
    tokens: dict[int, F32] = {}
    for at, row in enumerate(rows):
        rollout = (row.rollout_id, row.attempt)
        if rollout in rollouts.runs:  # whose turns are all in one row
            tokens[at] = _spread(row, own_runs(row), estimate.values[rollouts.lines[rollout]])
    out: list[RowAdvantage | None] = []
    for at, row in enumerate(rows):
        line = rollouts.lines.get((row.rollout_id, row.attempt))
        if line is None:
            out.append(None)
            continue
        by_token = tokens.get(at)
        value = float(estimate.values[line, 0]) if by_token is None else mean_of_trained(row, by_token)
        baseline, std = float(estimate.baseline[line, 0]), float(estimate.std[line, 0])
        out.append(RowAdvantage(row.rollout_id, row.branch, value, baseline, std, by_token))
    return out


def own_runs(row: TrainingSample) -> list[tuple[int, int]]:
    """(start, end) of each run of sampled tokens that are this row's own, trained or masked."""
    own = np.isin(row.sources, _OWN)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], own, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def mean_of_trained(row: TrainingSample, by_token: F32) -> float:
    """The mean over the row's trained tokens; 0 where there is none."""
    on = row.loss_mask.astype(bool)
    on[:1] = False
    return float(by_token[on].mean(dtype=np.float64)) if on.any() else 0.0


def _spread(row: TrainingSample, own: Sequence[tuple[int, int]], values: F64) -> F32:
    out = np.zeros(len(row.token_ids), dtype=np.float32)
    for (start, end), value in zip(own, values, strict=False):  # other rollouts may have more turns
        out[start:end] = value
    return out


def _reward(own: Sequence[TrainingSample]) -> float:
    reward = own[0].reward
    assert reward is not None, "rollouts without a reward take no part"
    return reward


def _turn_rewards(own: Sequence[TrainingSample]) -> list[float] | None:
    """One reward per turn, their sum being the rollout's. None where turns and their rewards cannot be paired: another number of them, or
    a reward that nobody knows, or turns in several branches."""
    runs, given = sum(len(own_runs(row)) for row in own), own[0].turn_rewards
    if runs == 1:
        return [_reward(own)]
    if sum(bool(own_runs(row)) for row in own) > 1:
        return None  # rewards come in the order of calls, which several branches do not tell
    known = [each for each in given if each is not None and math.isfinite(each)]
    if len(known) != len(given) or len(known) != runs:
        return None
    return [*known[:-1], known[-1] + _reward(own) - math.fsum(known)]
