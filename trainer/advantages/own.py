"""Finds an advantage of the user's by its name, and tries it before anything is trained with it.

In: "package.module:name", or "folder/file.py:name" from the current folder. Out: an `OwnAdvantage`, and what it says of rows, checked. It
waits for the import.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from palestra.agents.python import load_entry
from palestra.agents.types import AgentError
from palestra.server.types import TokenSource, TrainingSample, VersionSpan
from palestra.trainer.advantages.credit import mean_of_trained, taking_part
from palestra.trainer.types import F32, OwnAdvantage, RowAdvantage, TrainerError

WHAT = "algo.advantage"
FORM = "write def advantage(rows) -> a number or an array [T] or None per row, see palestra.trainer.types.OwnAdvantage"


@cache
def load_advantage(entry: str) -> OwnAdvantage:
    """The function that `entry` names, or an object of the class, made without arguments. Found and tried once per process, on two groups
    of two rollouts.

    Raises:
        TrainerError: there is no such name, or it does not do what an `OwnAdvantage` does; says what is wrong.
    """
    try:
        made = load_entry(entry, WHAT)
    except AgentError as error:
        raise TrainerError(str(error)) from error.__cause__
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise _wrong(entry, f"the class cannot be made without arguments: {_text(error)}") from error
    if not callable(made):
        raise _wrong(entry, f"it is {type(made).__name__}, nothing that can be called: {FORM}")
    own_advantages(entry, made, _trial())
    return made  # type: ignore[no-any-return]  # callable(), which mypy narrows to Any here


def own_advantages(entry: str, advantage: OwnAdvantage, rows: Sequence[TrainingSample]) -> list[RowAdvantage | None]:
    """What the user's function says of each row. It is shown only rows of rollouts that take part: with a reward, and a trained token.

    Raises:
        TrainerError: it failed, gave another number of answers, one of another shape, or one that is not finite.
    """
    kept = taking_part(rows)
    shown = [row for row in rows if (row.rollout_id, row.attempt) in kept]
    if not shown:
        return [None] * len(rows)
    try:
        answers = list(advantage(shown))
    except Exception as error:
        raise _wrong(entry, f"it raised {_text(error)}") from error
    if len(answers) != len(shown):
        raise _wrong(entry, f"{len(answers)} answers for {len(shown)} rows: {FORM}")
    said = {id(row): _checked(entry, row, answer) for row, answer in zip(shown, answers, strict=True)}
    return [said.get(id(row)) for row in rows]


def _checked(entry: str, row: TrainingSample, answer: Any) -> RowAdvantage | None:
    if answer is None:
        return None
    where = f"row {row.rollout_id}/{row.attempt} branch {row.branch}"
    try:
        values: F32 = np.asarray(answer, dtype=np.float32)
    except (TypeError, ValueError):
        raise _wrong(entry, f"{where}: {type(answer).__name__} is no number and no array of numbers: {FORM}") from None
    if values.shape not in ((), row.token_ids.shape):
        raise _wrong(
            entry, f"{where}: shape {values.shape}, and neither one number nor its {len(row.token_ids)} tokens"
        )
    on = row.loss_mask.astype(bool)
    on[:1] = False
    if not np.isfinite(values if values.shape == () else values[on]).all():
        raise _wrong(entry, f"{where}: it is not finite")
    if values.shape == ():
        return RowAdvantage(row.rollout_id, row.branch, float(values), 0.0, 0.0)
    by_token = np.where(on, values, np.float32(0.0)).astype(np.float32)
    return RowAdvantage(row.rollout_id, row.branch, mean_of_trained(row, by_token), 0.0, 0.0, by_token)


def _trial() -> list[TrainingSample]:
    """Two groups of two rollouts with unlike rewards; the last rollout has two rows."""
    told = [("a", "g", 0, 0.0), ("b", "g", 0, 1.0), ("c", "h", 0, 0.25), ("d", "h", 0, 0.75), ("d", "h", 1, 0.75)]
    return [_trial_row(*each) for each in told]


def _trial_row(rollout: str, group: str, branch: int, reward: float) -> TrainingSample:
    sources = np.array([TokenSource.PROMPT] * 2 + [TokenSource.SAMPLED] * 3, dtype=np.uint8)
    mask = (sources == int(TokenSource.SAMPLED)).astype(np.uint8)
    return TrainingSample(
        rollout_id=rollout,
        attempt=0,
        group_id=group,
        task_id=f"task of {group}",
        branch=branch,
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=mask,
        sources=sources,
        logprobs=np.where(mask == 1, -0.5, np.nan).astype(np.float32),
        spans=(VersionSpan(0, 2, 5),),
        temperature=1.0,
        reward=reward,
        turn_rewards=(0.0,),
        stop_reason="answer",
    )


def _wrong(entry: str, why: str) -> TrainerError:
    return TrainerError(f"{WHAT} {entry!r}: {why}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
