"""A trajectory as JSON and as conversations, and back. Pure; numpy is the heaviest import."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from palestra.server.types import TrainingSample, Trajectory, Turn, VersionSpan

_ARRAYS = {"prompt_delta": np.int32, "completion_ids": np.int32, "logprobs": np.float32}


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """As JSON values; routed experts are left out."""
    plain = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory) if f.name != "turns"}
    return {**plain, "turns": [_turn_json(turn) for turn in trajectory.turns]}


def _turn_json(turn: Turn) -> dict[str, Any]:
    plain = {f.name: getattr(turn, f.name) for f in fields(Turn) if f.name not in (*_ARRAYS, "spans", "routed_experts")}
    plain["spans"] = [[span.version, span.start, span.end] for span in turn.spans]
    return {**plain, **{name: getattr(turn, name).tolist() for name in _ARRAYS}}


def trajectory_of(data: Mapping[str, Any]) -> Trajectory:
    """What `trajectory_json` wrote."""
    turns = []
    for entry in data["turns"]:
        values = {**entry, **{name: np.asarray(entry[name], kind) for name, kind in _ARRAYS.items()}}
        values["spans"] = tuple(VersionSpan(*span) for span in entry["spans"])
        values["messages"] = tuple(entry["messages"])
        turns.append(Turn(**values))
    return Trajectory(**{**data, "turns": tuple(turns), "turn_rewards": tuple(data["turn_rewards"])})


def row_json(row: TrainingSample) -> dict[str, Any]:
    """A training row as JSON values; logprobs are null where nothing was sampled."""
    return {
        "branch": row.branch,
        "token_ids": row.token_ids.tolist(),
        "sources": row.sources.tolist(),
        "loss_mask": row.loss_mask.tolist(),
        "logprobs": [value if math.isfinite(value) else None for value in row.logprobs.tolist()],
        "spans": [[span.version, span.start, span.end] for span in row.spans],
    }


def branches(trajectory: Trajectory) -> list[list[Mapping[str, Any]]]:
    """One conversation per branch that the caller got, in the order of their last turns: from its first message to its last reply."""
    kept = {turn.index: turn for turn in trajectory.turns if turn.delivered}
    inner = {turn.parent for turn in kept.values()}
    return [_conversation(kept, turn) for turn in kept.values() if turn.index not in inner]


def _conversation(kept: Mapping[int, Turn], last: Turn) -> list[Mapping[str, Any]]:
    path: list[Turn] = [last]
    while (parent := path[-1].parent) is not None and parent in kept:
        path.append(kept[parent])
    parts: Sequence[Turn] = path[::-1]
    return [message for turn in parts for message in turn.messages]
