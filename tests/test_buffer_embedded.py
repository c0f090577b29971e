"""The durable buffer beyond the Protocol: files, damage, versions, restores, staleness, collection."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.buffer.types import VersionRefused
from palestra.server.types import GroupState, LeaseLost, SampleError, StoreError, TrajectoryGroup
from tests.conformance.buffer_suite import Clock, ids
from tests.fakes.rollouts import group


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[EmbeddedBuffer]:
    buffer = EmbeddedBuffer(tmp_path, clock=Clock())
    yield buffer
    buffer.close()


def train(buffer: EmbeddedBuffer, step: int, n: int = 1) -> list[str]:
    """Claims and commits `n` groups, as the trainer does in `step`."""
    names = ids(buffer.claim(n, "t", 60))
    assert buffer.commit(step, f"c{step}", names, "t") == n
    return names


def test_all_states_outlive_the_process_that_made_them(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    buffer.put([group(name, tokens=5) for name in "abcd"])
    train(buffer, 1)
    buffer.claim(1, "t", 60)
    buffer.drop(["c"], "why")
    buffer.put_dropped(group("e"), "zero_variance")
    buffer.record_publish(0, 0)
    buffer.close()
    again = EmbeddedBuffer(tmp_path, clock=Clock())
    expected = {"ready": 1, "claimed": 1, "committed": 1, "dropped": 2, "dropped(why)": 1, "dropped(zero_variance)": 1}
    assert again.counts() == expected
    assert again.highest_version() == 0
    assert again.put([group(name) for name in "abcde"]) == 0
    assert ids(again.claim(9, "t", 60)) == ["d"]
    assert again.commit(2, "c2", ["b", "d"], "t") == 2, "the lease of before still holds"
    again.close()


def test_one_writer_at_a_time(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="in use by another process"):
        EmbeddedBuffer(tmp_path)


def test_a_claim_whose_reply_was_lost_can_be_repeated(buffer: EmbeddedBuffer) -> None:
    buffer.put([group(name) for name in "abcd"])
    assert ids(buffer.claim(2, "t", 60, claim_id="x")) == ["a", "b"]
    assert ids(buffer.claim(2, "t", 60, claim_id="x")) == ["a", "b"]
    assert ids(buffer.claim(2, "t", 60, claim_id="y")) == ["c", "d"]
    buffer.commit(1, "c1", ["a"], "t")
    assert ids(buffer.reclaim("x", "t", 60)) == ["b"]
    assert buffer.reclaim("x", "other", 60) == buffer.reclaim("z", "t", 60) == []


def test_a_trained_row_without_reward_and_a_row_twice_are_refused(buffer: EmbeddedBuffer) -> None:
    good = group("g")
    unscored = dataclasses.replace(good, samples=(dataclasses.replace(good.samples[0], reward=None),))
    with pytest.raises(SampleError, match="reward is unknown"):
        buffer.put([unscored])
    with pytest.raises(SampleError, match="there twice"):
        buffer.put([dataclasses.replace(good, samples=good.samples[:1] * 2)])


def test_damaged_group_is_dropped_named_and_the_next_takes_its_place(
    buffer: EmbeddedBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer.put([group(name) for name in "abc"])
    (segment,) = (tmp_path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[30] ^= 1
    segment.write_bytes(data)
    reader = BufferReader(tmp_path)
    with pytest.raises(StoreError, match=rf"{segment} at offset 0: a damaged group"):
        reader.read_group("a")
    with caplog.at_level(logging.ERROR):
        assert ids(buffer.claim(2, "t", 60)) == ["b", "c"]
    assert f"group a is dropped: {segment} at offset 0" in caplog.text
    assert buffer.counts()["dropped(damaged)"] == 1
    reader.close()


def test_a_put_that_fails_leaves_no_bytes_behind(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    buffer.put([group("a")])
    (segment,) = (tmp_path / "segments").iterdir()
    size = segment.stat().st_size
    buffer._db.execute("pragma busy_timeout=10")
    other = sqlite3.connect(tmp_path / "buffer.db", isolation_level=None)
    other.execute("begin immediate")
    for _ in range(3):
        with pytest.raises(StoreError, match="locked"):
            buffer.put([group("b")])
    other.execute("rollback")
    other.close()
    assert {path.name: path.stat().st_size for path in (tmp_path / "segments").iterdir()} == {segment.name: size}
    buffer.put([group("b")])
    assert ids(buffer.claim(9, "t", 60)) == ["a", "b"]


def test_torn_tail_and_unnamed_segments_are_ignored(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    buffer.put([group("a")])
    buffer.close()
    folder = tmp_path / "segments"
    (segment,) = folder.iterdir()
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:50])
    (folder / "00000007.seg").write_bytes(b"never acknowledged")
    again = EmbeddedBuffer(tmp_path)
    again.put([group("b")])
    assert ids(again.claim(9, "t", 60)) == ["a", "b"]
    assert sorted(path.name for path in folder.iterdir()) == ["00000001.seg", "00000002.seg"]
    again.close()


def test_versions_only_grow(buffer: EmbeddedBuffer) -> None:
    assert buffer.highest_version() == -1
    assert buffer.train_step_of(5) == 0
    buffer.record_publish(0, 0)
    buffer.record_publish(3, 2)
    for version in (3, 1):
        with pytest.raises(VersionRefused, match="3 was published before"):
            buffer.record_publish(version, 9)
    assert [buffer.train_step_of(v) for v in (0, 1, 3, 4)] == [0, 0, 2, 2]
    assert buffer.highest_version() == 3


def test_stale_groups_are_dropped_by_train_steps_not_by_versions(buffer: EmbeddedBuffer) -> None:
    for version, step in ((0, 0), (1, 2), (2, 4), (5, 5)):
        buffer.record_publish(version, step)
    buffer.put([group(f"v{v}", version=v) for v in (0, 1, 2, 5)])
    assert buffer.drop_older_than(train_step_now=6, max_staleness=3) == ["v0", "v1"]
    assert buffer.drop_older_than(train_step_now=6, max_staleness=3) == []
    assert ids(buffer.claim(9, "t", 60)) == ["v2", "v5"]
    assert buffer.drop_older_than(train_step_now=99, max_staleness=0) == [], "claimed groups are being trained"
    assert buffer.counts()["dropped(stale)"] == 2


def test_restore_readies_what_came_after_and_abandons_lost_weights(buffer: EmbeddedBuffer) -> None:
    for version in range(4):
        buffer.record_publish(version, version)
    buffer.put([group("a", version=0), group("b", version=0), group("c", version=1), group("d", version=2)])
    for step in (1, 2, 3):
        train(buffer, step)  # a in 1, b in 2, c in 3
    buffer.put([group("e", version=3), group("f", version=1)])
    assert ids(buffer.claim(1, "t", 60)) == ["d"]
    report = buffer.restore(train_step=1, policy_version=1)
    assert report.readied == ("b", "c")
    assert report.abandoned == ("d", "e")
    assert report.next_version == 4
    with pytest.raises(LeaseLost):
        buffer.commit(4, "c4", ["d"], "t")
    assert buffer.restore(train_step=1, policy_version=1).readied == (), "once is enough"
    assert ids(buffer.claim(9, "u", 60)) == ["b", "c", "f"]


def test_tokens_of_a_lost_lineage_are_dropped_when_they_come_late(buffer: EmbeddedBuffer) -> None:
    for version in range(4):
        buffer.record_publish(version, version)
    buffer.restore(train_step=1, policy_version=1)
    buffer.record_publish(4, 1)
    assert buffer.put([group("late", version=2), group("same", version=1), group("new", version=4)]) == 3
    assert ids(buffer.claim(9, "t", 60)) == ["same", "new"]
    assert buffer.counts()["dropped(abandoned)"] == 1


def test_a_second_restore_to_one_checkpoint_keeps_its_republished_weights(buffer: EmbeddedBuffer) -> None:
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


def test_restore_abandons_versions_that_nobody_published(buffer: EmbeddedBuffer) -> None:
    buffer.record_publish(0, 0)
    buffer.put([group("odd", version=7)])
    assert buffer.restore(train_step=0, policy_version=0).abandoned == ("odd",)


def test_segments_go_when_no_kept_checkpoint_can_need_them(tmp_path: Path) -> None:
    buffer = EmbeddedBuffer(tmp_path, segment_bytes=1)  # a segment per put
    for name in "abcd":
        buffer.put([group(name)])
    train(buffer, 1)
    train(buffer, 2)
    buffer.drop(["c"], "why")
    assert buffer.collect(1) == ["00000001.seg", "00000003.seg"]
    assert buffer.collect(1) == []
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["00000002.seg", "00000004.seg"]
    reader = BufferReader(tmp_path)
    with pytest.raises(StoreError, match="arrays of group a are not stored"):
        reader.read_group("a")
    reader.close()
    with pytest.raises(StoreError, match="group a, trained after step 0, is not stored any more"):
        buffer.restore(train_step=0, policy_version=0)
    assert buffer.counts()["committed"] == 2, "a refused restore changes nothing"
    assert buffer.restore(train_step=1, policy_version=0).readied == ("b",)
    assert ids(buffer.claim(9, "t", 60)) == ["b", "d"]
    buffer.close()


def test_reader_sees_counts_and_rows(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    buffer.put([group("a", version=3, tokens=5)])
    train(buffer, 4)
    reader = BufferReader(tmp_path)
    (entry,) = reader.entries()
    assert (entry.state, entry.step, entry.checkpoint_id, entry.versions) == (GroupState.COMMITTED, 4, "c4", (3,))
    assert [(c.rollout_id, c.reward, c.trained, dict(c.masked)) for c in entry.rollouts] == [
        ("a-0", 0.0, 5, {}),
        ("a-1", 1.0, 5, {}),
    ]
    back = reader.read_group("a")
    assert np.array_equal(back.samples[1].token_ids, group("a", tokens=5).samples[1].token_ids)
    reader.close()


def test_threads_share_a_buffer_and_each_group_goes_out_once(tmp_path: Path) -> None:
    buffer = EmbeddedBuffer(tmp_path)
    taken: list[list[str]] = [[], []]
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
    consumers = [threading.Thread(target=consume, args=(i,)) for i in range(2)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join()
    done.set()
    for thread in consumers:
        thread.join()
    assert sorted(taken[0] + taken[1]) == sorted(f"{w}-{i}" for w in range(2) for i in range(20))
    assert buffer.counts()["committed"] == 40
    buffer.close()


def test_a_newer_schema_is_refused(buffer: EmbeddedBuffer, tmp_path: Path) -> None:
    buffer.close()
    db = sqlite3.connect(tmp_path / "buffer.db")
    db.execute("pragma user_version=99")
    db.close()
    for open_it in (EmbeddedBuffer, BufferReader):
        with pytest.raises(StoreError, match=r"buffer.db: written with schema 99"):
            open_it(tmp_path)


def test_put_dropped_is_recorded_once(buffer: EmbeddedBuffer) -> None:
    empty = TrajectoryGroup("e", "task", 4, ())
    assert buffer.put_dropped(empty, "infra")
    assert not buffer.put_dropped(empty, "infra")
    assert buffer.counts()["dropped(infra)"] == 1
