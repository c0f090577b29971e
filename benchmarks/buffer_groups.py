"""The groups that are put and taken: made of rollouts, as the service makes them, half of their tokens sampled.

In: names and lengths. Out: groups, and the record of their rollouts in a turn log, which `/admin/put` compares rows with. It waits for the
disk where it writes that record.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from palestra.server.rows import group_of
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord
from palestra.server.types import Trajectory, TrajectoryGroup, Turn, VersionSpan

SIZE = 8
"""Rows of a group."""
TURNS = 8
"""Of a rollout; half of each is sampled."""
LENGTHS = (2048, 16_384)
"""Tokens of a row."""
KINDS = 4
"""Different groups of a length; more of them only differ by their names."""
VOCABULARY = 49_152


@cache
def _turns(tokens: int, kind: int) -> tuple[tuple[Turn, ...], ...]:
    """The turns of each of a group's rollouts."""
    random = np.random.default_rng([tokens, kind])
    each = tokens // TURNS
    sampled = each // 2

    def turn(index: int) -> Turn:
        return Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_delta=random.integers(VOCABULARY, size=each - sampled, dtype=np.int32),
            close_tokens=0,
            completion_ids=random.integers(VOCABULARY, size=sampled, dtype=np.int32),
            logprobs=-random.exponential(size=sampled).astype(np.float32),
            finish_reason="stop",
            spans=(VersionSpan(0, 0, sampled),),
            temperature=1.0,
        )

    return tuple(tuple(turn(index) for index in range(TURNS)) for _ in range(SIZE))


def _rollouts(group_id: str, tokens: int, kind: int) -> tuple[Trajectory, ...]:
    return tuple(
        Trajectory(
            rollout_id=f"{group_id}-{index}",
            attempt=0,
            group_id=group_id,
            task_id="task",
            turns=turns,
            reward=index / SIZE,
            turn_rewards=(None,) * TURNS,
            stop_reason="answer",
            truncated=False,
        )
        for index, turns in enumerate(_turns(tokens, kind))
    )


@cache
def _group(tokens: int, kind: int) -> TrajectoryGroup:
    return group_of("", "task", SIZE, _rollouts("", tokens, kind))


def make_group(group_id: str, tokens: int, kind: int) -> TrajectoryGroup:
    """The group of that name; its arrays are those of every one of its kind."""
    like = _group(tokens, kind % KINDS)
    rows = tuple(
        dataclasses.replace(row, group_id=group_id, rollout_id=f"{group_id}{row.rollout_id}") for row in like.samples
    )
    return TrajectoryGroup(group_id, like.task_id, SIZE, rows, {row.rollout_id: row.reward or 0.0 for row in rows})


def same(found: TrajectoryGroup, put: TrajectoryGroup) -> bool:
    """Whether a group came out as it went in."""
    if (found.group_id, found.rewards, len(found.samples)) != (put.group_id, put.rewards, len(put.samples)):
        return False
    arrays = ("token_ids", "loss_mask", "sources", "logprobs")
    return all(
        a.spans == b.spans and all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in arrays)
        for a, b in zip(found.samples, put.samples, strict=True)
    )


def write_record(store: Path, groups: Iterable[tuple[str, int, int]]) -> None:
    """Puts the rollouts of groups (name, tokens, kind) into the turn log of a store folder, as closed sessions."""
    asyncio.run(_write_record(store, groups))


async def _write_record(store: Path, groups: Iterable[tuple[str, int, int]]) -> None:
    log = TurnLog(store)
    writes: list[asyncio.Future[None] | asyncio.Future[bool]] = []
    for group_id, tokens, kind in groups:
        for index, rollout in enumerate(_rollouts(group_id, tokens, kind % KINDS)):
            key = (rollout.rollout_id, rollout.attempt)
            writes.append(log.open_session(SessionRecord(*key, group_id, rollout.task_id, index)))
            writes += [log.append_turn(*key, turn) for turn in rollout.turns]
            ended = SessionOutcome(rollout.reward, turn_rewards=rollout.turn_rewards, stop_reason=rollout.stop_reason)
            writes.append(log.close_session(*key, ended))
    await asyncio.gather(*writes)
    await log.close()
