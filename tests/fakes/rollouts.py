"""Rollouts made by hand: turns, trajectories and groups with recognisable numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palestra.server.rows import group_of
from palestra.server.types import Trajectory, TrajectoryGroup, Turn, VersionSpan


def turn(
    index: int,
    parent: int | None,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    version: int = 0,
    **changes: Any,
) -> Turn:
    """A turn whose logprobs are -id/1000, all sampled by `version`."""
    ids = np.asarray(completion, np.int32)
    fields: dict[str, Any] = {
        "index": index,
        "parent": parent,
        "prompt_delta": np.asarray(prompt, np.int32),
        "close_tokens": 0,
        "completion_ids": ids,
        "logprobs": (ids / -1000).astype(np.float32),
        "finish_reason": "stop",
        "spans": (VersionSpan(version, 0, len(ids)),),
        "temperature": 1.0,
    }
    return Turn(**{**fields, **changes})


def trajectory(turns: Sequence[Turn], rollout_id: str = "r0", group_id: str = "g0", **changes: Any) -> Trajectory:
    """A closed rollout with reward 1."""
    fields: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt": 0,
        "group_id": group_id,
        "task_id": "task",
        "turns": tuple(turns),
        "reward": 1.0,
        "turn_rewards": (1.0,),
        "stop_reason": "answer",
        "truncated": False,
    }
    return Trajectory(**{**fields, **changes})


def group(group_id: str, *, version: int = 0, size: int = 2, tokens: int = 3) -> TrajectoryGroup:
    """A group of `size` one-turn rollouts, each with `tokens` sampled tokens of `version` and its index as its reward."""
    ids = range(10, 10 + tokens)
    rollouts = [
        trajectory([turn(0, None, [1, 2], ids, version=version)], f"{group_id}-{i}", group_id, reward=float(i))
        for i in range(size)
    ]
    return group_of(group_id, "task", size, rollouts)
