"""The embedded buffer's files: damage, torn tails, failed writes, and which segments go when."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.buffer.reader import BufferReader
from palestra.server.buffer.retention import Retention
from palestra.server.types import StoreError
from palestra.server.wire.codec import encode_group
from tests.conformance.buffer_suite import Clock, ids
from tests.conformance.run_buffer_suite import train
from tests.fakes.rollouts import group


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[EmbeddedBuffer]:
    buffer = EmbeddedBuffer(tmp_path, clock=Clock())
    yield buffer
    buffer.close()


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


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "segments").iterdir())


def test_a_segment_stays_for_its_last_group(tmp_path: Path) -> None:
    """Two groups a segment; the newest segment is being written to, so it stays."""
    size = len(encode_group(group("g")))
    buffer = EmbeddedBuffer(tmp_path, segment_bytes=2 * size, clock=Clock())
    for name in "abcde":
        buffer.put([group(name)])
    train(buffer, 1, n=3)
    assert buffer.collect(1) == ["00000001.seg"], "c is free, d beside it is not"
    train(buffer, 2, n=2)
    assert buffer.collect(2) == ["00000002.seg"]
    assert names_in(tmp_path) == ["00000003.seg"]
    buffer.close()
    again = EmbeddedBuffer(tmp_path, clock=Clock())
    assert again.collect(2) == ["00000003.seg"]
    assert names_in(tmp_path) == []
    again.close()


def test_size_takes_the_oldest_free_segments_before_their_time(tmp_path: Path) -> None:
    clock = Clock()
    size = len(encode_group(group("g")))
    buffer = EmbeddedBuffer(
        tmp_path, segment_bytes=1, retention=Retention(keep_s=1e9, keep_bytes=3 * size), clock=clock
    )
    for name in "abcde":
        buffer.put([group(name)])
        train(buffer, 1)
        clock.now += 1
    assert buffer.collect(0) == [], "more than it should be, but all of it may be needed"
    assert buffer.collect(1) == ["00000001.seg", "00000002.seg"]
    assert buffer.collect(1) == []
    buffer.close()


def test_restored_groups_are_not_free_any_more(tmp_path: Path) -> None:
    clock = Clock()
    buffer = EmbeddedBuffer(tmp_path, segment_bytes=1, retention=Retention(keep_s=100), clock=clock)
    buffer.put([group("a")])
    train(buffer, 1)
    assert buffer.collect(1) == []
    assert buffer.restore(0, 0).readied == ("a",)
    clock.now += 1000
    buffer.put([group("b")])
    assert buffer.collect(1) == []
    assert ids(buffer.claim(9, "t", 60)) == ["a", "b"]
    buffer.close()
