"""Law 3: whatever happens to turns, rollouts and groups, every sampled token is somewhere, and trained at most once."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.ledger import Ledger, read_ledger
from palestra.server.rows import group_of
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord
from palestra.server.types import SAMPLED_SOURCES, StoreError, TokenSource, TrajectoryGroup, VersionSpan
from tests.conformance.buffer_suite import Clock
from tests.fakes.rollouts import turn


class Run:
    """A made-up run on a real log and a real buffer. Every sampled token has an id of its own."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self.folder, self.rng = folder, rng
        self.clock = Clock()
        self.log = TurnLog(folder, self.clock)
        self.buffer = EmbeddedBuffer(folder, segment_bytes=2000, clock=self.clock)
        self.ids = itertools.count(100)
        self.step = 0
        self.version = 0
        self.checkpoints = [(0, 0)]
        self.buffer.record_publish(0, 0)
        self.groups: dict[str, TrajectoryGroup] = {}
        self.committed: dict[str, int] = {}
        """The surviving lineage: group id -> train step."""

    async def close(self) -> None:
        self.buffer.close()
        await self.log.close()

    async def play_rollout(self, group_id: str, index: int) -> None:
        rng, rollout_id, attempt = self.rng, f"{group_id}-{index}", 0
        if rng.random() < 0.2:
            await self.play_session(SessionRecord(rollout_id, 0, group_id, "t", index))
            await self.log.discard_session(rollout_id, 0, "restart")
            attempt = 1
        await self.play_session(SessionRecord(rollout_id, attempt, group_id, "t", index))
        if rng.random() < 0.9:
            reward = rng.choice([0.0, 1.0, 1.0, None])
            stop = "answer" if reward is not None else rng.choice(["infra", "cancelled"])
            outcome = SessionOutcome(reward, stop_reason=stop, truncated=rng.random() < 0.3)
            await self.log.close_session(rollout_id, attempt, outcome)

    async def play_session(self, record: SessionRecord) -> None:
        rng = self.rng
        await self.log.open_session(record)
        kept: list[int] = []
        for index in range(rng.randint(0, 5)):
            parent = rng.choice([*kept, *kept, None]) if kept else None
            ids = [next(self.ids) for _ in range(rng.randint(0, 4))]
            cut = rng.randint(0, len(ids))
            older = max(self.version - 1, 0)
            spans = (VersionSpan(older, 0, cut), VersionSpan(self.version, cut, len(ids)))
            delta = rng.randint(1, 3)
            close = rng.randint(0, delta) if parent is not None else 0
            delivered = rng.random() < 0.8
            made = turn(index, parent, [1] * delta, ids, spans=spans, close_tokens=close)
            await self.log.append_turn(record.rollout_id, record.attempt, made)
            if delivered:
                kept.append(index)
            else:
                await self.log.mark_delivered(record.rollout_id, record.attempt, index, False)

    async def play_group(self, group_id: str) -> None:
        rng = self.rng
        size = rng.randint(1, 3)
        for index in range(size):
            await self.play_rollout(group_id, index)
        sessions = [s for s in self.log.reader.read_sessions(group_id=group_id) if s.state != "discarded"]
        if any(s.outcome is None for s in sessions):
            return  # still open
        with_unscored = rng.random() < 0.5
        chosen = [s for s in sessions if s.outcome and (with_unscored or s.outcome.reward is not None)]
        rollouts = [self.log.reader.read_trajectory(s.record.rollout_id, s.record.attempt) for s in chosen]
        group = group_of(group_id, "t", size, rollouts, mask_truncated=rng.random() < 0.5)
        fate = rng.random()
        if not group.samples or fate < 0.2:
            self.buffer.put_dropped(group, "zero_variance" if group.samples else "infra")
        elif fate < 0.9:
            self.buffer.put([group])
            self.groups[group_id] = group

    def train(self) -> None:
        """One act of a trainer, whole or broken off."""
        rng, owner = self.rng, f"t{self.step}"
        act = rng.choice(["step", "step", "step", "break", "release", "restore", "stale", "drop", "collect", "reopen"])
        if act in ("step", "break", "release"):
            names = [g.group_id for g in self.buffer.claim(rng.randint(1, 3), owner, 10)]
            if act == "release":
                self.buffer.release(names, owner)
            elif act == "step" and names:
                self.step += 1
                self.buffer.commit(self.step, f"c{self.step}", names, owner)
                assert self.committed.keys().isdisjoint(names), "a group is trained once in a lineage"
                self.committed.update(dict.fromkeys(names, self.step))
                self.version = self.buffer.highest_version() + 1
                self.buffer.record_publish(self.version, self.step)
                if rng.random() < 0.5:
                    self.checkpoints.append((self.step, self.version))
        elif act == "restore":
            self.step, policy_version = self.checkpoints[-1]
            self.committed = {name: step for name, step in self.committed.items() if step <= self.step}
            self.version = self.buffer.restore(self.step, policy_version).next_version
            self.buffer.record_publish(self.version, self.step)
        elif act == "stale":
            self.buffer.drop_older_than(self.step, rng.randint(0, 2))
        elif act == "drop" and self.groups:
            self.buffer.drop([rng.choice(list(self.groups))], "by_hand")
        elif act == "collect":
            del self.checkpoints[:-1]
            self.buffer.collect(self.checkpoints[-1][0])
        elif act == "reopen":
            self.buffer.close()
            self.buffer = EmbeddedBuffer(self.folder, segment_bytes=2000, clock=self.clock)
        self.clock.now += rng.choice([0, 20])

    def sampled_ids(self) -> Counter[int]:
        turns = (
            self.log.reader.read_trajectory(s.record.rollout_id, s.record.attempt).turns
            for s in self.log.reader.read_sessions()
        )
        return Counter(int(i) for played in turns for made in played for i in made.completion_ids)


def trained_ids(groups: list[TrajectoryGroup]) -> Counter[int]:
    return Counter(int(i) for g in groups for row in g.samples for i in row.token_ids[row.loss_mask == 1])


def owned_ids(group: TrajectoryGroup) -> Counter[int]:
    """Sampled tokens of a group's rows, the shared ones where they are owned."""
    owned = list(SAMPLED_SOURCES - {TokenSource.SHARED})
    return Counter(int(i) for row in group.samples for i in row.token_ids[np.isin(row.sources, owned)])


async def check_run(folder: Path, rng: Random) -> None:
    run = Run(folder, rng)
    for number in range(rng.randint(1, 6)):
        await run.play_group(f"g{number}")
        for _ in range(rng.randint(0, 4)):
            run.train()
        ledger = read_ledger(folder)
        assert ledger.balanced, ledger
    over = read_ledger(folder, run_over=True)
    assert over.balanced
    assert over.pending == 0

    sampled = run.sampled_ids()
    assert over.sampled == sum(sampled.values())
    assert committed_names(folder) == run.committed.keys()
    trained = trained_ids([run.groups[name] for name in run.committed])
    assert over.trained == sum(trained.values())
    assert set(trained.values()) <= {1}, "a token is trained in at most one row"
    assert trained.keys() <= sampled.keys()
    for group in run.groups.values():
        assert set(owned_ids(group).values()) <= {1}
    await run.close()


def committed_names(folder: Path) -> set[str]:
    reader = BufferReader(folder)
    names = {entry.group_id for entry in reader.entries() if entry.state == "committed"}
    reader.close()
    return names


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_it_always_balances(rng: Random) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # durability is not what is tested here
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        asyncio.run(check_run(Path(folder), rng))


async def small_run(folder: Path) -> tuple[TurnLog, EmbeddedBuffer, TrajectoryGroup]:
    """A group of two: a forked rollout of 2 + 3 + 4 tokens, 7 undelivered; an unscored one of 5."""
    log, buffer = TurnLog(folder), EmbeddedBuffer(folder)
    for index in range(2):
        await log.open_session(SessionRecord(f"r{index}", 0, "g", "t", index))
    for made in (
        turn(0, None, [1], [10, 11]),
        turn(1, 0, [2], [12, 13, 14]),
        turn(2, 0, [3], [15, 16, 17, 18]),
        turn(3, 2, [4], [20] * 7, delivered=False),
    ):
        await log.append_turn("r0", 0, made)
    await log.append_turn("r1", 0, turn(0, None, [1], [30] * 5))
    await log.close_session("r0", 0, SessionOutcome(1.0, stop_reason="answer"))
    await log.close_session("r1", 0, SessionOutcome(None, stop_reason="infra"))
    return log, buffer, group_of("g", "t", 2, [log.reader.read_trajectory(f"r{i}") for i in range(2)])


async def test_every_column_by_hand(tmp_path: Path) -> None:
    log, buffer, group = await small_run(tmp_path)
    assert read_ledger(tmp_path) == Ledger(21, 0, {}, {"infra": 5, "undelivered": 7}, 9)
    buffer.put([group])
    assert read_ledger(tmp_path) == Ledger(21, 0, {}, {"undelivered": 7}, 14)
    buffer.claim(1, "t", 60)
    buffer.commit(1, "c", ["g"], "t")
    after = Ledger(21, 9, {"unscored": 5}, {"undelivered": 7}, 0)
    assert read_ledger(tmp_path) == after
    assert after.balanced
    assert [line.split() for line in after.lines()] == [
        ["sampled", "21", "tokens"],
        ["trained", "9", "42.9%"],
        ["masked(unscored)", "5", "23.8%"],
        ["discarded(undelivered)", "7", "33.3%"],
        ["the", "ledger", "balances"],
    ]
    assert after.as_dict()["masked"] == {"unscored": 5}
    await log.open_session(SessionRecord("late", 0, "h", "t", 0))
    await log.append_turn("late", 0, turn(0, None, [1], [40]))
    assert read_ledger(tmp_path).pending == 1
    assert read_ledger(tmp_path, run_over=True).discarded == {"run_end": 1, "undelivered": 7}
    buffer.close()
    await log.close()


async def test_a_scored_rollout_without_rows_is_left_out(tmp_path: Path) -> None:
    log, buffer, group = await small_run(tmp_path)
    buffer.put([dataclasses.replace(group, samples=tuple(r for r in group.samples if r.rollout_id == "r1"))])
    ledger = read_ledger(tmp_path)
    assert ledger.discarded == {"left_out": 9, "undelivered": 7}
    assert ledger.balanced
    buffer.close()
    await log.close()


@pytest.mark.parametrize(("change", "difference"), [("lost", 4), ("twice", -2)])
async def test_a_lost_or_doubled_row_shows(tmp_path: Path, change: str, difference: int) -> None:
    log, buffer, group = await small_run(tmp_path)
    first, second, unscored = group.samples
    if change == "lost":
        rows = (first, unscored)
    else:  # the second branch trains the shared prefix too
        sources = np.where(second.sources == TokenSource.SHARED, TokenSource.SAMPLED, second.sources).astype(np.uint8)
        mask = (sources == TokenSource.SAMPLED).astype(np.uint8)
        rows = (first, dataclasses.replace(second, sources=sources, loss_mask=mask), unscored)
    buffer.put([dataclasses.replace(group, samples=rows)])
    buffer.claim(1, "t", 60)
    buffer.commit(1, "c", ["g"], "t")
    ledger = read_ledger(tmp_path)
    assert ledger.difference == difference
    assert not ledger.balanced
    assert ledger.lines()[-1] == f"the ledger does NOT balance: {difference:+} tokens"
    buffer.close()
    await log.close()


async def test_ledger_of_a_log_without_buffer_and_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        read_ledger(tmp_path)
    await TurnLog(tmp_path).close()
    empty = read_ledger(tmp_path)
    assert (empty.sampled, empty.balanced) == (0, True)
    assert empty.lines()[0].endswith("0 tokens")
