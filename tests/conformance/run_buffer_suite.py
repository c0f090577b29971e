"""What every `RunBuffer` and its reader keep, beyond `BufferSuite`. Subclass `RunBufferSuite` and give a fixture `store`."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest

from palestra.server.buffer.retention import Retention
from palestra.server.buffer.types import Depth, RunBuffer, RunBufferReader, VersionRefused
from palestra.server.rows import group_of
from palestra.server.types import GroupState, LeaseLost, SampleError, StoreError, TokenSource, TrajectoryGroup
from tests.conformance.buffer_suite import BufferSuite, Clock, ids
from tests.fakes.rollouts import group, trajectory, turn


class StoreUnderTest(Protocol):
    """One run's store, empty at first, that is opened again and again."""

    def open(self, retention: Retention = ...) -> RunBuffer:
        """The buffer, with the suite's clock; an earlier one has been closed."""

    def reader(self) -> RunBufferReader:
        """A reader of it, beside the buffer."""

    def damage(self, group_id: str) -> None:
        """Changes a byte of a group's arrays."""


def train(buffer: RunBuffer, step: int, n: int = 1) -> list[str]:
    """Claims and commits `n` groups, as the trainer does in `step`."""
    names = ids(buffer.claim(n, "t", 60))
    assert buffer.commit(step, f"c{step}", names, "t") == n
    return names


def of_versions(group_id: str, *versions: int) -> TrajectoryGroup:
    """A group with one rollout of each version."""
    rollouts = [
        trajectory([turn(0, None, [1], [10, 11], version=version)], f"{group_id}-{i}", group_id, reward=float(i))
        for i, version in enumerate(versions)
    ]
    return group_of(group_id, "task", len(versions), rollouts)


def masked_whole(before: TrajectoryGroup) -> TrajectoryGroup:
    """The group with all sampled tokens masked as too old."""
    rows = []
    for row in before.samples:
        was_sampled = row.sources == int(TokenSource.SAMPLED)
        sources = np.where(was_sampled, np.uint8(TokenSource.STALE), row.sources).astype(np.uint8)
        rows.append(dataclasses.replace(row, sources=sources, loss_mask=np.zeros_like(row.loss_mask)))
    return dataclasses.replace(before, samples=tuple(rows))


class RunBufferSuite(BufferSuite):
    @pytest.fixture
    def buffer(self, store: StoreUnderTest) -> Iterator[RunBuffer]:
        buffer = store.open()
        yield buffer
        buffer.close()

    @pytest.fixture
    def reader(self, buffer: RunBuffer, store: StoreUnderTest) -> Iterator[RunBufferReader]:
        reader = store.reader()
        yield reader
        reader.close()

    # What outlives a process.

    def test_all_states_outlive_the_process_that_made_them(self, buffer: RunBuffer, store: StoreUnderTest) -> None:
        buffer.put([group(name, tokens=5) for name in "abcd"])
        train(buffer, 1)
        buffer.claim(1, "t", 60)
        buffer.drop(["c"], "why")
        buffer.put_dropped(group("e"), "zero_variance")
        buffer.record_publish(0, 0)
        buffer.close()
        again = store.open()
        assert again.counts() == {
            "ready": 1, "claimed": 1, "committed": 1, "dropped": 2, "dropped(why)": 1, "dropped(zero_variance)": 1,
        }  # fmt: skip
        assert again.highest_version() == 0
        assert again.put([group(name) for name in "abcde"]) == 0
        assert ids(again.claim(9, "t", 60)) == ["d"]
        assert again.commit(2, "c2", ["b", "d"], "t") == 2, "the lease of before still holds"
        again.close()

    def test_what_was_put_first_stays(self, buffer: RunBuffer) -> None:
        buffer.put([group("a", tokens=3)])
        assert buffer.put([group("a", tokens=7)]) == 0
        assert len(buffer.claim(1, "t", 60)[0].samples[0].token_ids) == len(group("a", tokens=3).samples[0].token_ids)

    # Claims.

    def test_a_claim_whose_reply_was_lost_can_be_repeated(self, buffer: RunBuffer) -> None:
        buffer.put([group(name) for name in "abcd"])
        assert ids(buffer.claim(2, "t", 60, claim_id="x")) == ["a", "b"]
        assert ids(buffer.claim(2, "t", 60, claim_id="x")) == ["a", "b"]
        assert ids(buffer.claim(2, "t", 60, claim_id="y")) == ["c", "d"]
        buffer.commit(1, "c1", ["a"], "t")
        assert ids(buffer.reclaim("x", "t", 60)) == ["b"]
        assert buffer.reclaim("x", "other", 60) == buffer.reclaim("z", "t", 60) == []

    def test_reclaim_extends_the_lease(self, buffer: RunBuffer, clock: Clock) -> None:
        buffer.put([group("a")])
        buffer.claim(1, "t", 10, claim_id="x")
        clock.now += 9
        assert ids(buffer.reclaim("x", "t", 10)) == ["a"]
        clock.now += 9
        assert buffer.claim(1, "other", 10) == []
        clock.now += 2
        assert ids(buffer.claim(1, "other", 10, claim_id="x")) == ["a"]
        assert buffer.reclaim("x", "t", 10) == []

    def test_what_was_released_is_nobodys(self, buffer: RunBuffer) -> None:
        buffer.put([group("a")])
        buffer.claim(1, "t", 10, claim_id="x")
        assert buffer.release(["a"], "t") == 1
        assert buffer.reclaim("x", "t", 10) == []
        assert buffer.renew(["a"], "t", 10) == 0

    def test_a_damaged_group_is_dropped_named_and_the_next_takes_its_place(
        self, buffer: RunBuffer, reader: RunBufferReader, store: StoreUnderTest, caplog: pytest.LogCaptureFixture
    ) -> None:
        buffer.put([group(name) for name in "abc"])
        store.damage("a")
        with pytest.raises(StoreError, match="a damaged group"):
            reader.read_group("a")
        with caplog.at_level(logging.ERROR):
            assert ids(buffer.claim(2, "t", 60)) == ["b", "c"]
        assert "group a is dropped" in caplog.text
        assert buffer.counts()["dropped(damaged)"] == 1

    def test_a_trained_row_without_reward_and_a_row_twice_are_refused(self, buffer: RunBuffer) -> None:
        good = group("g")
        unscored = dataclasses.replace(good, samples=(dataclasses.replace(good.samples[0], reward=None),))
        with pytest.raises(SampleError, match="reward is unknown"):
            buffer.put([unscored])
        with pytest.raises(SampleError, match="there twice"):
            buffer.put([dataclasses.replace(good, samples=good.samples[:1] * 2)])
        assert buffer.counts()["ready"] == 0

    def test_a_name_that_is_no_text_is_refused(self, buffer: RunBuffer) -> None:
        buffer.put([group("a")])
        with pytest.raises(StoreError, match="cannot be stored"):
            buffer.put_dropped(TrajectoryGroup("b", "task", 2, ()), "half a character: \ud83d")
        assert buffer.put([group("b")]) == 1, "the buffer goes on"

    # Counts and ages.

    def test_put_dropped_is_recorded_once(self, buffer: RunBuffer, reader: RunBufferReader) -> None:
        empty = TrajectoryGroup("e", "task", 4, ())
        assert buffer.put_dropped(empty, "infra")
        assert not buffer.put_dropped(empty, "infra")
        assert buffer.counts()["dropped(infra)"] == 1
        assert buffer.dropped("infra") == ["e"]
        with pytest.raises(StoreError, match="arrays of group e are not stored"):
            reader.read_group("e")

    def test_dropped_names_groups_by_reason_in_their_order(self, buffer: RunBuffer) -> None:
        buffer.put([group(name) for name in "abc"])
        buffer.drop(["c"], "x")
        buffer.drop(["b"], "y")
        buffer.drop(["a"], "x")
        assert (buffer.dropped("x"), buffer.dropped("y"), buffer.dropped("z")) == (["a", "c"], ["b"], [])

    def test_depths_say_how_long_groups_are_there(self, buffer: RunBuffer, clock: Clock) -> None:
        assert buffer.depths() == {"ready": Depth(0, 0.0, 0.0), "claimed": Depth(0, 0.0, 0.0)}
        for name in "abc":
            buffer.put([group(name)])
            clock.now += 10
        buffer.claim(1, "t", 5)
        assert buffer.depths() == {"ready": Depth(2, 20.0, 15.0), "claimed": Depth(1, 30.0, 30.0)}
        clock.now += 5
        assert buffer.depths() == {"ready": Depth(3, 35.0, 25.0), "claimed": Depth(0, 0.0, 0.0)}
        assert buffer.ready_count() == 3
        assert buffer.counts()["ready"] == 3

    def test_recount_notes_what_is_trained_until_it_is(self, buffer: RunBuffer, reader: RunBufferReader) -> None:
        first, second = group("a"), group("b")
        buffer.put([first, second])
        buffer.claim(2, "t", 60)
        buffer.recount([masked_whole(first), group("unknown")])
        buffer.commit(1, "c1", ["a", "b"], "t")
        buffer.recount([masked_whole(second)])
        counts = {entry.group_id: entry.rollouts[0] for entry in reader.entries()}
        assert (counts["a"].trained, dict(counts["a"].masked)) == (0, {"stale": 3})
        assert (counts["b"].trained, dict(counts["b"].masked)) == (3, {}), "trained as it was"

    # The lineage of weights.

    def test_versions_only_grow(self, buffer: RunBuffer) -> None:
        assert buffer.highest_version() == -1
        assert buffer.train_step_of(5) == 0
        buffer.record_publish(0, 0)
        buffer.record_publish(3, 2)
        for version in (3, 1):
            with pytest.raises(VersionRefused, match="3 was published before"):
                buffer.record_publish(version, 9)
        assert [buffer.train_step_of(v) for v in (0, 1, 3, 4)] == [0, 0, 2, 2]
        assert buffer.highest_version() == 3

    def test_stale_groups_are_dropped_by_train_steps_not_by_versions(self, buffer: RunBuffer) -> None:
        for version, step in ((0, 0), (1, 2), (2, 4), (5, 5)):
            buffer.record_publish(version, step)
        buffer.put([group(f"v{v}", version=v) for v in (0, 1, 2, 5)])
        assert buffer.drop_older_than(train_step_now=6, max_staleness=3) == ["v0", "v1"]
        assert buffer.drop_older_than(train_step_now=6, max_staleness=3) == []
        assert ids(buffer.claim(9, "t", 60)) == ["v2", "v5"]
        assert buffer.drop_older_than(train_step_now=99, max_staleness=0) == [], "claimed groups are being trained"
        assert buffer.counts()["dropped(stale)"] == 2

    def test_the_newest_token_may_decide_instead_of_the_oldest(self, buffer: RunBuffer, clock: Clock) -> None:
        for version in range(4):
            buffer.record_publish(version, version)
        buffer.put([of_versions("old", 0, 1), of_versions("mixed", 0, 3), of_versions("new", 3, 2)])
        buffer.claim(1, "t", 10)
        clock.now += 10  # a lease that ran out protects nothing
        assert buffer.drop_older_than(3, 1, newest=True) == ["old"]
        assert buffer.drop_older_than(3, 1) == ["mixed"]
        assert ids(buffer.claim(9, "t", 60)) == ["new"]

    def test_restore_readies_what_came_after_and_abandons_lost_weights(self, buffer: RunBuffer) -> None:
        for version in range(4):
            buffer.record_publish(version, version)
        buffer.put([group("a", version=0), group("b", version=0), group("c", version=1), group("d", version=2)])
        for step in (1, 2, 3):
            train(buffer, step)  # a in 1, b in 2, c in 3
        buffer.put([group("e", version=3), group("f", version=1)])
        assert ids(buffer.claim(1, "t", 60)) == ["d"]
        report = buffer.restore(train_step=1, policy_version=1)
        assert (report.readied, report.abandoned, report.next_version) == (("b", "c"), ("d", "e"), 4)
        with pytest.raises(LeaseLost):
            buffer.commit(4, "c4", ["d"], "t")
        assert buffer.restore(train_step=1, policy_version=1).readied == (), "once is enough"
        assert ids(buffer.claim(9, "u", 60)) == ["b", "c", "f"]

    def test_tokens_of_a_lost_lineage_are_dropped_when_they_come_late(
        self, buffer: RunBuffer, reader: RunBufferReader
    ) -> None:
        for version in range(4):
            buffer.record_publish(version, version)
        buffer.restore(train_step=1, policy_version=1)
        buffer.record_publish(4, 1)
        assert buffer.put([group("late", version=2), group("same", version=1), group("new", version=4)]) == 3
        assert ids(buffer.claim(9, "t", 60)) == ["same", "new"]
        assert buffer.counts()["dropped(abandoned)"] == 1
        assert (buffer.descends([0, 1, 4]), buffer.descends([1, 2]), buffer.descends([])) == (True, False, True)
        assert reader.publishes() == ((0, 0, False), (1, 1, False), (2, 2, True), (3, 3, True), (4, 1, False))

    def test_a_second_restore_to_one_checkpoint_keeps_its_republished_weights(self, buffer: RunBuffer) -> None:
        for version in range(3):
            buffer.record_publish(version, version)
        buffer.restore(train_step=1, policy_version=1)
        buffer.record_publish(3, 1)  # the weights of step 1 again
        buffer.put([group("same", version=3)])
        buffer.record_publish(4, 2)
        buffer.put([group("lost", version=4)])
        report = buffer.restore(train_step=1, policy_version=1)
        assert (report.readied, report.abandoned, report.next_version) == ((), ("lost",), 5)
        assert ids(buffer.claim(9, "t", 60)) == ["same"]

    def test_restore_abandons_versions_that_nobody_published(self, buffer: RunBuffer) -> None:
        buffer.record_publish(0, 0)
        buffer.put([group("odd", version=7)])
        assert buffer.restore(train_step=0, policy_version=0).abandoned == ("odd",)

    # What is deleted.

    def test_a_restore_that_needs_what_is_gone_changes_nothing(
        self, buffer: RunBuffer, reader: RunBufferReader, store: StoreUnderTest
    ) -> None:
        for name in "abcd":
            buffer.put([group(name)])
        train(buffer, 1)
        train(buffer, 2)
        buffer.drop(["c"], "why")
        assert len(buffer.collect(1)) == 2, "those of a and c"
        assert buffer.collect(1) == []
        with pytest.raises(StoreError, match="arrays of group a are not stored"):
            reader.read_group("a")
        with pytest.raises(StoreError, match="group a, trained after step 0, is not stored any more"):
            buffer.restore(train_step=0, policy_version=0)
        assert buffer.counts()["committed"] == 2
        assert buffer.restore(train_step=1, policy_version=0).readied == ("b",)
        assert ids(buffer.claim(9, "t", 60)) == ["b", "d"]

    def test_retention_keeps_what_is_free_for_its_time(
        self, store: StoreUnderTest, clock: Clock, reader: RunBufferReader, buffer: RunBuffer
    ) -> None:
        buffer.close()
        kept = store.open(Retention(keep_s=100.0))
        for name in "abc":
            kept.put([group(name)])
        train(kept, 1)
        assert kept.collect(1) == []
        assert [entry.free_at for entry in reader.entries()] == [clock.now, None, None]
        clock.now += 99
        assert kept.collect(1) == []
        assert reader.read_group("a").group_id == "a"
        clock.now += 1
        assert len(kept.collect(1)) == 1
        assert [entry.shelf is not None for entry in reader.entries()] == [False, True, True]
        kept.close()

    # Readers.

    def test_a_reader_sees_counts_and_rows(self, buffer: RunBuffer, reader: RunBufferReader, clock: Clock) -> None:
        buffer.put([group("a", version=3, tokens=5), group("b")])
        clock.now += 5
        train(buffer, 4)
        done, waiting = reader.entries()
        assert (done.state, done.step, done.checkpoint_id, done.versions) == (GroupState.COMMITTED, 4, "c4", (3,))
        assert (done.put_at, done.ended_at, done.owner) == (clock.now - 5, clock.now, "t")
        assert (waiting.state, waiting.ended_at, waiting.free_at) == (GroupState.READY, None, None)
        assert done.shelf
        assert done.stored_bytes > 0
        assert [(c.rollout_id, c.reward, c.trained, dict(c.masked)) for c in done.rollouts] == [
            ("a-0", 0.0, 5, {}),
            ("a-1", 1.0, 5, {}),
        ]
        back = reader.read_group("a")
        assert np.array_equal(back.samples[1].token_ids, group("a", tokens=5).samples[1].token_ids)
        assert reader.counts() == {"ready": 1, "claimed": 0, "committed": 1, "dropped": 0}
        with pytest.raises(StoreError, match="no group nobody"):
            reader.read_group("nobody")

    # Threads.

    def test_threads_share_a_buffer_and_each_group_goes_out_once(self, buffer: RunBuffer) -> None:
        taken: list[list[str]] = [[], [], []]
        done = threading.Event()

        def produce(worker: int) -> None:
            for i in range(20):
                buffer.put([group(f"{worker}-{i}")])

        def consume(worker: int) -> None:
            while not (done.is_set() and buffer.ready_count() == 0):
                names = ids(buffer.claim(3, f"c{worker}", 60))
                assert buffer.commit(1, "c1", names, f"c{worker}") == len(names)
                taken[worker] += names

        producers = [threading.Thread(target=produce, args=(i,)) for i in range(2)]
        consumers = [threading.Thread(target=consume, args=(i,)) for i in range(3)]
        for thread in producers + consumers:
            thread.start()
        for thread in producers:
            thread.join()
        done.set()
        for thread in consumers:
            thread.join()
        assert sorted(name for names in taken for name in names) == sorted(
            f"{w}-{i}" for w in range(2) for i in range(20)
        )
        assert buffer.counts()["committed"] == 40

    def test_one_writer_at_a_time(self, buffer: RunBuffer, store: StoreUnderTest) -> None:
        with pytest.raises(StoreError, match="in use by another"):
            store.open()
        assert buffer.put([group("a")]) == 1
