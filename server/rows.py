"""Turns into training rows: one row per root-to-leaf path of a rollout's turns, every sampled token trained in at
most one.

In: a finished `Trajectory`. Out: its `TrainingSample`s, and a group of them. Pure functions of numpy arrays; nothing
is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from palestra.server.types import (
    I16,
    SAMPLED,
    U8,
    SampleError,
    TokenSource,
    TrainingSample,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
)

Masks: TypeAlias = Sequence[Sequence[int]]
"""Per row of a rollout, in the order of its branches, a 0 or 1 per token."""


def trajectory_rows(trajectory: Trajectory, *, mask_truncated: bool = False) -> tuple[TrainingSample, ...]:
    """The rows of one rollout, in the order of their leaves. Turns that were not delivered are left out.

    Where branches share turns, the first leaf trains them and the others see them as SHARED. Without a reward every
    sampled token is UNSCORED; with `mask_truncated` those of an episode that a limit cut are OVERLONG.

    Raises:
        SampleError: the turns form no tree, or a row would break laws 1 or 2.
    """
    where = f"rollout {trajectory.rollout_id}/{trajectory.attempt}"
    kept = _kept_turns(trajectory, where)
    inner = {turn.parent for turn in kept.values()}
    paths = [_path(kept, turn) for turn in kept.values() if turn.index not in inner]
    owner_source = _owner_source(trajectory, mask_truncated)
    owned: set[int] = set()
    rows = []
    for branch, path in enumerate(paths):
        rows.append(_row(trajectory, branch, path, owned, owner_source, where))
        owned.update(turn.index for turn in path)
    return tuple(rows)


def rows_of_open(trajectory: Trajectory) -> tuple[TrainingSample, ...]:
    """The rows that a rollout would have if it ended now with a reward."""
    return trajectory_rows(replace(trajectory, reward=0.0))


def group_of(
    group_id: str,
    task_id: str,
    group_size: int,
    trajectories: Sequence[Trajectory],
    *,
    mask_truncated: bool = False,
    masks: Mapping[str, Masks] = MappingProxyType({}),
) -> TrajectoryGroup:
    """The group that these rollouts make. A rollout without a kept turn has no row, and its reward is left out with it. `masks`: by rollout
    id, those that were made by hand, one per row.

    Raises:
        SampleError: a rollout is of another group, or breaks laws 1 or 2.
    """
    samples: list[TrainingSample] = []
    rewards: dict[str, float] = {}
    for trajectory in trajectories:
        if trajectory.group_id != group_id:
            raise SampleError(f"rollout {trajectory.rollout_id} is of group {trajectory.group_id}, not of {group_id}")
        rows = trajectory_rows(trajectory, mask_truncated=mask_truncated)
        if trajectory.rollout_id in masks:
            rows = with_masks(rows, masks[trajectory.rollout_id])
        samples += rows
        if rows and rows[0].reward is not None:
            rewards[trajectory.rollout_id] = rows[0].reward
    return TrajectoryGroup(group_id, task_id, group_size, tuple(samples), rewards)


def with_masks(rows: Sequence[TrainingSample], masks: Masks) -> tuple[TrainingSample, ...]:
    """Rows under masks made by hand: one per row, a 0 or 1 per token.

    Raises:
        SampleError: not one mask per row, another length, another value, or a 1 on a token that is not this row's own sampled one (law 2).
    """
    if not rows or len(masks) != len(rows):
        raise SampleError(f"{len(masks)} masks for the {len(rows)} rows of this rollout; give one per row (branch)")
    out = []
    for row, given in zip(rows, masks, strict=True):
        where = f"mask of row {row.rollout_id}/{row.attempt} branch {row.branch}"
        mask = np.asarray(given)
        if mask.shape != row.token_ids.shape:
            raise SampleError(f"{where}: {mask.size} entries for {len(row.token_ids)} tokens")
        if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
            raise SampleError(f"{where}: it must hold 0 and 1 alone")
        wrong = mask.astype(bool) & ~row.loss_mask.astype(bool)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise SampleError(
                f"{where}: 1 at {at}, whose source is {TokenSource(int(row.sources[at])).name}: only what the engine sampled, and no other "
                "row trains, can be trained on"
            )
        out.append(replace(row, loss_mask=mask.astype(np.uint8)))
    return tuple(out)


def mask_versions(
    group: TrajectoryGroup, too_old: Callable[[int, int], bool]
) -> tuple[TrajectoryGroup, list[tuple[int, int]]]:
    """The group with the tokens of some weights masked as STALE: `too_old(version, newest)` decides, `newest` being the newest version of
    the rollout. Also (length of the row, newly masked tokens) of each row that changed."""
    newest: dict[tuple[str, int], int] = {}
    for row in group.samples:
        key = (row.rollout_id, row.attempt)
        newest[key] = max([newest.get(key, -1), *(span.version for span in row.spans)])
    rows, lengths = [], []
    for row in group.samples:
        old = np.zeros(len(row.token_ids), bool)
        for span in row.spans:
            if too_old(span.version, newest[row.rollout_id, row.attempt]):
                old[span.start : span.end] = True
        old &= row.loss_mask.astype(bool)
        if old.any():
            lengths.append((len(old), int(old.sum())))
            sources, mask = row.sources.copy(), row.loss_mask.copy()
            sources[old], mask[old] = TokenSource.STALE, 0
            row = replace(row, sources=sources, loss_mask=mask)
        rows.append(row)
    return replace(group, samples=tuple(rows)), lengths


def _kept_turns(trajectory: Trajectory, where: str) -> dict[int, Turn]:
    kept: dict[int, Turn] = {}
    for turn in sorted(trajectory.turns, key=lambda turn: turn.index):
        if not turn.delivered:
            continue
        if turn.index in kept:
            raise SampleError(f"{where}: two turns {turn.index}")
        if turn.parent is not None and turn.parent not in kept:
            raise SampleError(
                f"{where}: turn {turn.index} extends turn {turn.parent}, which was not delivered or is later"
            )
        if turn.close_tokens and (turn.parent is None or turn.close_tokens > len(turn.prompt_delta)):
            raise SampleError(f"{where}: turn {turn.index} has {turn.close_tokens} close tokens that close nothing")
        kept[turn.index] = turn
    return kept


def _path(kept: dict[int, Turn], leaf: Turn) -> list[Turn]:
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(kept[parent])
    return path[::-1]


def _reward(trajectory: Trajectory) -> float | None:
    """A reward that is not finite is one that nobody knows."""
    known = trajectory.reward is not None and math.isfinite(trajectory.reward)
    return trajectory.reward if known else None


def _owner_source(trajectory: Trajectory, mask_truncated: bool) -> TokenSource:
    if _reward(trajectory) is None:
        return TokenSource.UNSCORED
    return TokenSource.OVERLONG if mask_truncated and trajectory.truncated else TokenSource.SAMPLED


def _row(
    trajectory: Trajectory, branch: int, path: list[Turn], owned: set[int], owner_source: TokenSource, where: str
) -> TrainingSample:
    total = sum(len(turn.prompt_delta) + len(turn.completion_ids) for turn in path)
    token_ids = np.empty(total, np.int32)
    sources = np.empty(total, np.uint8)
    logprobs = np.full(total, np.nan, np.float32)
    spans: list[VersionSpan] = []
    ends: list[int] = []
    at = 0
    for turn in path:
        start, end = at + len(turn.prompt_delta), at + len(turn.prompt_delta) + len(turn.completion_ids)
        if len(turn.logprobs) != end - start:
            raise SampleError(f"{where}: turn {turn.index} has {end - start} ids but {len(turn.logprobs)} logprobs")
        token_ids[at:start], token_ids[start:end] = turn.prompt_delta, turn.completion_ids
        sources[at:start] = TokenSource.PROMPT if turn.parent is None else TokenSource.OBSERVATION
        sources[at : at + turn.close_tokens] = TokenSource.CLOSE
        sources[start:end] = TokenSource.SHARED if turn.index in owned else owner_source
        logprobs[start:end] = turn.logprobs
        spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in turn.spans]
        ends.append(end)
        at = end
    mask: U8 = (sources == SAMPLED).astype(np.uint8)
    return TrainingSample(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        branch=branch,
        token_ids=token_ids,
        loss_mask=mask,
        sources=sources,
        logprobs=logprobs,
        spans=tuple(spans),
        temperature=_temperature(path, where),
        reward=_reward(trajectory),
        turn_rewards=trajectory.turn_rewards,
        stop_reason=trajectory.stop_reason,
        routed_experts=_experts(path, ends, where),
    )


def _temperature(path: list[Turn], where: str) -> float:
    """A row has one temperature, since the trainer divides all its logits by it."""
    found = {turn.temperature for turn in path}
    if len(found) > 1:
        raise SampleError(f"{where}: turns sampled at temperatures {sorted(found)} share a row; keep one for a rollout")
    return found.pop()


def _experts(path: list[Turn], ends: list[int], where: str) -> I16 | None:
    """[tokens - 1, layers, topk]: the experts that each token but the last was routed to, where they are known for all.

    The leaf's array speaks of the whole sequence where it is that long. Otherwise the turns' own parts are joined: a
    turn's array either covers all up to its end (its last part is used) or its own delta and completion.
    """
    leaf = path[-1].routed_experts
    if leaf is not None and len(leaf) == ends[-1] - 1:
        return leaf
    parts: list[I16] = []
    start = 0
    for turn, end in zip(path, ends, strict=True):
        experts = turn.routed_experts
        if experts is None:
            return None
        wanted = end - start - (1 if start == 0 else 0)
        if len(experts) not in {end - 1, wanted}:
            raise SampleError(
                f"{where}: turn {turn.index} has experts of {len(experts)} tokens, not {wanted} or {end - 1}"
            )
        parts.append(experts[len(experts) - wanted :])
        start = end
    return np.concatenate(parts)
