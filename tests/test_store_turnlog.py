"""The turn log: what is acknowledged is on the disk, errors reach every waiter, the files can be read by path alone."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from palestra.envs.types import Episode, Reward, StopReason
from palestra.server.store.reader import StoreReader
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import GroupRecord, SessionOutcome, SessionRecord, SessionState, outcome_of
from palestra.server.types import GroupState, SampleError, SessionError, StoreError, Turn, VersionSpan
from tests.fakes.rollouts import turn


def record(rollout_id: str = "r0", attempt: int = 0, index: int = 0) -> SessionRecord:
    return SessionRecord(rollout_id, attempt, "g0", "task", index, {"key": "k", "n": [1, 2]})


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[TurnLog]:
    log = TurnLog(tmp_path)
    yield log
    await log.close()


def assert_same(a: Turn, b: Turn) -> None:
    for field in dataclasses.fields(a):
        was, now = getattr(a, field.name), getattr(b, field.name)
        if isinstance(was, np.ndarray):
            assert was.dtype == now.dtype, field.name
            np.testing.assert_array_equal(was, now, err_msg=field.name)
        else:
            assert was == now, field.name


async def test_a_turn_comes_back_as_it_went_in(log: TurnLog, tmp_path: Path) -> None:
    surrogate = {"role": "tool", "content": "caf\u00e9 \u2028 \ud800 <|im_end|>", "big": 2**80}
    first = turn(
        0,
        None,
        [1, 2],
        [10, 11, 12],
        spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        messages=({"role": "user", "content": "\x00"}, surrogate),
        routed_experts=np.arange(16, dtype=np.int16).reshape(4, 2, 2),
        temperature=0.7,
    )
    second = turn(1, None, [], [], fork_reason="history changed", cached_tokens=5, finish_reason="abort", spans=())
    await log.open_session(record())
    await log.append_turn("r0", 0, first)
    await log.append_turn("r0", 0, second)
    reader = StoreReader(tmp_path)
    back = reader.read_trajectory("r0")
    assert len(back.turns) == 2
    assert_same(first, back.turns[0])
    assert_same(second, back.turns[1])
    assert (back.reward, back.stop_reason, back.truncated) == (None, "", False)
    (event,) = reader.read_events("r0")
    assert (event.kind, event.data) == ("fork", {"turn": 1, "reason": "history changed"})
    reader.close()


async def test_sessions_and_groups(log: TurnLog) -> None:
    assert await log.put_group(GroupRecord("g0", {"id": "t", "level": 1}, 7, 2))
    assert not await log.put_group(GroupRecord("g0", 5, 8, 3)), "a repeated put leaves it alone"
    assert await log.update_group("g0", state=GroupState.READY)
    assert not await log.update_group("nobody", attempt=2)
    assert log.reader.read_groups() == (GroupRecord("g0", {"id": "t", "level": 1}, 7, 2, 0, GroupState.READY),)
    assert log.reader.read_groups(GroupState.OPEN) == ()

    for i in range(3):
        await log.open_session(record(f"r{i}", index=i))
    await log.append_turn("r0", 0, turn(0, None, [1], [10, 11]))
    await log.append_turn("r0", 0, turn(1, 0, [2], [12]))
    await log.mark_delivered("r0", 0, 1, False)
    await log.mark_delivered("r0", 0, 1, False)
    outcome = SessionOutcome(0.5, {"right": 0.5}, (None, 0.5), "answer", False, True, None, {"messages": [1]})
    assert await log.close_session("r0", 0, outcome)
    assert not await log.close_session("r0", 0, SessionOutcome(1.0)), "the first end stands"
    assert await log.discard_session("r1", 0, "restart")
    assert not await log.discard_session("r1", 0, "again")

    first, second, third = log.reader.read_sessions(group_id="g0")
    assert (first.record, first.state, first.outcome) == (record("r0"), SessionState.CLOSED, outcome)
    assert (first.turns, first.sampled_tokens, first.undelivered_tokens) == (2, 3, 1)
    assert (second.state, second.discard_reason) == (SessionState.DISCARDED, "restart")
    assert third.ended_at is None
    assert [s.record.rollout_id for s in log.reader.read_sessions(state=SessionState.OPEN)] == ["r2"]
    assert log.reader.read_trajectory("r0").turn_rewards == (None, 0.5)


async def test_newest_attempt_is_read_unless_told(log: TurnLog) -> None:
    await log.open_session(record(attempt=0))
    await log.open_session(record(attempt=1))
    await log.append_turn("r0", 0, turn(0, None, [1], [10]))
    assert log.reader.read_trajectory("r0").turns == ()
    assert len(log.reader.read_trajectory("r0", 0).turns) == 1
    with pytest.raises(SessionError, match="no session r0 attempt 2"):
        log.reader.read_trajectory("r0", 2)


async def test_refusals_name_the_session_and_spare_their_neighbours(log: TurnLog) -> None:
    await log.open_session(record())
    await log.append_turn("r0", 0, turn(0, None, [1], [10]))
    await log.close_session("r0", 0, SessionOutcome(1.0))
    await log.open_session(record("r1"))
    results = await asyncio.gather(
        log.open_session(record()),
        log.append_turn("r0", 0, turn(1, 0, [1], [10])),
        log.append_turn("nobody", 0, turn(0, None, [1], [10])),
        log.append_turn("r1", 0, turn(0, None, [1], [10])),
        log.append_turn("r1", 0, turn(0, None, [1], [11])),
        log.close_session("nobody", 0, SessionOutcome(1.0)),
        log.mark_delivered("r1", 0, 9, False),
        log.add_event("nobody", 0, "retry", {}),
        log.append_turn("r1", 0, turn(1, 0, [1], [12])),
        return_exceptions=True,
    )
    codes = [r.code if isinstance(r, SessionError) else type(r).__name__ for r in results]
    expected = ["session_exists", "session_closed", "session_closed", "NoneType", "turn_exists"]
    assert codes == [*expected, "unknown_session", "unknown_turn", "unknown_session", "NoneType"]
    assert [t.completion_ids.tolist() for t in log.reader.read_trajectory("r1").turns] == [[10], [12]]


async def test_text_that_cannot_be_stored_is_refused_at_once(log: TurnLog) -> None:
    with pytest.raises(StoreError, match="cannot be stored"):
        log.open_session(record("bad\ud800"))


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.zeros(1, np.float32)},
        {"spans": (VersionSpan(0, 0, 1),)},
        {"spans": (VersionSpan(0, 1, 2),)},
        {"spans": (VersionSpan(-1, 0, 2),)},
        {"parent": 0},
        {"close_tokens": 2},
    ],
)
async def test_turn_that_does_not_fit_itself_is_refused_at_once(log: TurnLog, changes: dict[str, object]) -> None:
    await log.open_session(record())
    with pytest.raises(SampleError):
        log.append_turn("r0", 0, dataclasses.replace(turn(0, None, [1], [10, 11]), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [float("nan"), float("-inf")])
async def test_reward_that_is_no_number_is_unknown(log: TurnLog, reward: float) -> None:
    await log.open_session(record())
    await log.close_session("r0", 0, SessionOutcome(reward))
    assert log.reader.read_trajectory("r0").reward is None


async def test_outcome_of_an_episode(log: TurnLog) -> None:
    episode = Episode(
        "t",
        ({"role": "user", "content": "hi"},),
        (),
        Reward(0.2, {"a": 0.2}),
        (0.2,),
        StopReason.MAX_TURNS,
        False,
        True,
        1,
    )
    await log.open_session(record())
    await log.close_session("r0", 0, outcome_of(episode))
    (session,) = log.reader.read_sessions()
    assert session.outcome is not None
    assert (session.outcome.reward, session.outcome.stop_reason, session.outcome.truncated) == (0.2, "max_turns", True)
    assert session.outcome.episode is not None
    assert session.outcome.episode["messages"] == [{"role": "user", "content": "hi"}]


async def test_writes_of_one_tick_share_a_commit(log: TurnLog) -> None:
    await log.open_session(record())
    before = log.reader.commits()
    await asyncio.gather(*(log.append_turn("r0", 0, turn(i, None, [i], [10, 11])) for i in range(64)))
    assert log.reader.commits() - before <= 2
    assert [t.index for t in log.reader.read_trajectory("r0").turns] == list(range(64))


async def test_an_error_of_the_batch_reaches_every_waiter_and_the_log_goes_on(
    log: TurnLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.open_session(record())
    log._commit._db.execute("pragma busy_timeout=50")
    other = sqlite3.connect(log.path, isolation_level=None)
    other.execute("begin immediate")  # somebody holds the write lock
    results = await asyncio.gather(
        *(log.append_turn("r0", 0, turn(i, None, [i], [10])) for i in range(5)), return_exceptions=True
    )
    assert [type(r) for r in results] == [StoreError] * 5
    assert "locked" in str(results[0])
    other.execute("rollback")
    other.close()
    await log.append_turn("r0", 0, turn(0, None, [1], [10]))
    assert len(log.reader.read_trajectory("r0").turns) == 1


async def test_a_cancelled_waiter_does_not_stop_the_write(log: TurnLog) -> None:
    await log.open_session(record())
    future = log.append_turn("r0", 0, turn(0, None, [1], [10]))
    future.cancel()
    await log.append_turn("r0", 0, turn(1, 0, [1], [11]))
    assert [t.index for t in log.reader.read_trajectory("r0").turns] == [0, 1]


async def test_close_makes_all_of_it_durable_and_ends(tmp_path: Path) -> None:
    log = TurnLog(tmp_path)
    futures = [log.open_session(record(f"r{i}")) for i in range(20)]
    await log.close()
    assert all(future.done() for future in futures)
    with pytest.raises(StoreError, match="closed"):
        log.open_session(record("late"))
    await log.close()
    assert sorted(os.listdir(tmp_path)) == ["turns.db", "turns.lock"], "all of it is in one file"
    reader = StoreReader(tmp_path)
    assert len(reader.read_sessions()) == 20
    reader.close()


async def test_one_writer_at_a_time(log: TurnLog, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="in use by another process"):
        TurnLog(tmp_path)
    await log.close()
    await TurnLog(tmp_path).close()


async def test_a_newer_schema_is_refused_by_writer_and_reader(tmp_path: Path) -> None:
    await TurnLog(tmp_path).close()
    db = sqlite3.connect(tmp_path / "turns.db")
    db.execute("pragma user_version=99")
    db.close()
    for open_it in (TurnLog, StoreReader):
        with pytest.raises(StoreError, match=r"turns.db: written with schema 99, this palestra knows schemas up to"):
            open_it(tmp_path)


def test_no_log_and_no_database_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        StoreReader(tmp_path)
    (tmp_path / "turns.db").write_bytes(b"")
    with pytest.raises(StoreError, match="empty database"):
        StoreReader(tmp_path)
    (tmp_path / "turns.db").write_bytes(b"this is a text file, and not a short one" * 100)
    with pytest.raises(StoreError, match="not a database"):
        StoreReader(tmp_path)
    with pytest.raises(StoreError, match="not a database"):
        TurnLog(tmp_path)
