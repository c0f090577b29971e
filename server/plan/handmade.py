"""Groups that somebody brings ready made, and masks made by hand: held to what is on record of their sessions (law 2).

In: groups and the turn log. Out: nothing, or the first thing that the record does not say. It waits for the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.server.plan.types import PlanReader
from palestra.server.rows import trajectory_rows
from palestra.server.store.types import SessionState
from palestra.server.types import SAMPLED_SOURCES, SampleError, TrainingSample, TrajectoryGroup

_IS_SAMPLED = np.zeros(256, bool)
_IS_SAMPLED[[int(source) for source in SAMPLED_SOURCES]] = True
"""By source: a look into a table costs a tenth of `np.isin`."""


def check_on_record(groups: Sequence[TrajectoryGroup], reader: PlanReader) -> None:
    """Rewards and masks may be the bringer's own; tokens, logprobs and versions are the engine's.

    Raises:
        SampleError: a row of no closed session, or one that differs from the record.
    """
    for group in groups:
        states = {
            (session.record.rollout_id, session.record.attempt): session.state
            for session in reader.read_sessions(group_id=group.group_id)
        }
        rows: dict[tuple[str, int], list[TrainingSample]] = {}
        for row in group.samples:
            rows.setdefault((row.rollout_id, row.attempt), []).append(row)
        for key, given in rows.items():
            name = f"group {group.group_id}: rollout {key[0]} attempt {key[1]}"
            if states.get(key) is not SessionState.CLOSED:
                raise SampleError(f"{name}: no closed session of that group is on record")
            recorded = {row.branch: row for row in trajectory_rows(reader.read_trajectory(*key))}
            for row in given:
                if row.branch not in recorded:
                    raise SampleError(f"{name}: it has no branch {row.branch}")
                _compare(row, recorded[row.branch], f"{name} branch {row.branch}")


def _compare(given: TrainingSample, recorded: TrainingSample, where: str) -> None:
    if not _same(given.token_ids, recorded.token_ids):
        raise SampleError(f"{where}: its tokens are not those on record")
    if not _same(given.sources, recorded.sources) and not _same(
        _IS_SAMPLED[given.sources], _IS_SAMPLED[recorded.sources]
    ):
        raise SampleError(f"{where}: its sources say of another token that the engine sampled it")
    if not _same(given.logprobs, recorded.logprobs):
        sampled = _IS_SAMPLED[recorded.sources]  # what else has a logprob is nobody's business
        if not np.array_equal(given.logprobs[sampled], recorded.logprobs[sampled]):
            raise SampleError(f"{where}: its logprobs are not those on record")
    if given.spans != recorded.spans:
        raise SampleError(f"{where}: its version spans are not those on record")
    if not _same(given.loss_mask, recorded.loss_mask) and (given.loss_mask & ~recorded.loss_mask & 1).any():
        at = int(np.flatnonzero(given.loss_mask & ~recorded.loss_mask & 1)[0])
        raise SampleError(f"{where}: mask 1 at {at}, which the record does not let be trained")


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Bit for bit. Comparing bytes costs a tenth of `np.array_equal`."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()
