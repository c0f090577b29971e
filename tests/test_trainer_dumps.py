"""Dumped batches: whole or refused, and trained again without engines with the same result."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from palestra.server.types import RenderedRow, SampleError, TrajectoryGroup
from palestra.trainer import dumps
from palestra.trainer.checkpoints import Checkpoint, Meta
from palestra.trainer.dumps import (
    Batch,
    DumpError,
    Origin,
    batch_files,
    batch_path,
    check_origin,
    choose_batch,
    decode_batch,
    encode_batch,
    read_batch,
    write_batch,
)
from palestra.trainer.offline import DumpSource, DumpWriter, NoEngines, as_version, check_age
from palestra.trainer.records import row_record
from palestra.trainer.replay import _start, differences
from palestra.trainer.step import StepResult
from palestra.trainer.types import RowAdvantage
from tests.fakes.rollouts import group

ORIGIN = Origin("run", 1, 4, 7, "shape", "hash", True)


def batch(step: int = 1, version: int = 4, **changes: Any) -> Batch:
    origin = dataclasses.replace(ORIGIN, step=step, policy_version=version, **changes)
    return Batch(origin, (group(f"g{step}", version=version), group(f"h{step}", version=version, tokens=5)))


def no_rows(transcripts: Sequence[Mapping[str, Any]]) -> list[RenderedRow]:
    raise AssertionError("nothing is rendered here")


def same(one: Batch, other: Batch) -> bool:
    """Arrays do not compare as values; their bytes do."""
    return encode_batch(one) == encode_batch(other)


def test_a_batch_comes_back_as_it_was_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    told = batch(step=3)
    path = write_batch(tmp_path / "deep" / "dump", told)
    assert path.name == "step-00000003.batch"
    read = read_batch(path)
    assert read.origin == told.origin
    assert same(read, told)
    for ours, theirs in zip(read.groups, told.groups, strict=True):
        assert ours.rewards == theirs.rewards
        np.testing.assert_array_equal(ours.samples[0].logprobs, theirs.samples[0].logprobs)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    write_batch(path.parent, batch(step=3, version=9))
    assert read_batch(path).origin.policy_version == 9
    assert len(list(path.parent.iterdir())) == 1


def test_an_empty_batch_has_bytes_too() -> None:
    assert decode_batch(encode_batch(Batch(ORIGIN, ()))) == Batch(ORIGIN, ())


def test_any_changed_byte_and_any_cut_is_noticed() -> None:
    blob = encode_batch(batch())
    for at in range(0, len(blob), 7):
        spoiled = bytearray(blob)
        spoiled[at] ^= 0x10
        with pytest.raises(DumpError):
            decode_batch(bytes(spoiled))
    for end in range(0, len(blob), 11):
        with pytest.raises(DumpError):
            decode_batch(blob[:end])
    with pytest.raises(DumpError):
        decode_batch(blob + bytes(8))


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (b"", "no batch that palestra dumped"),
        (b"PK\x03\x04" + bytes(100), "name a file or folder that --rollout-only or run.dump wrote"),
        (struct.pack("<6sHQQ", b"PLDUMP", 2, 0, 0), "format 2, this palestra knows format 1; use a newer one"),
        (struct.pack("<6sHQQ", b"PLDUMP", 0, 0, 0), "use an older one"),
        (encode_batch(batch())[:-8], "copy it again, or move it away"),
    ],
)
def test_foreign_and_damaged_files_say_what_to_do(tmp_path: Path, blob: bytes, said: str) -> None:
    path = batch_path(tmp_path, 1)
    path.write_bytes(blob)
    with pytest.raises(DumpError, match=said) as caught:
        read_batch(path)
    assert str(path) in str(caught.value)


def test_a_row_that_breaks_a_law_is_refused_however_good_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(blob: bytes) -> TrajectoryGroup:
        raise SampleError("mask 1 on a token without a finite logprob")

    blob = encode_batch(batch())
    monkeypatch.setattr(dumps, "decode_group", broken)
    with pytest.raises(DumpError, match="faulty program: mask 1"):
        decode_batch(blob)


def test_batches_are_found_in_the_order_of_their_steps_and_others_left_alone(tmp_path: Path) -> None:
    assert batch_files(tmp_path / "none") == []
    with pytest.raises(DumpError, match="no batch is there"):
        choose_batch(tmp_path)
    for step in (10, 2, 100_000_000):
        write_batch(tmp_path, batch(step))
    for name in ("notes.txt", ".tmp-step-00000011.batch-5", "step-3.batch", "step-00000004.batch.old"):
        (tmp_path / name).write_bytes(b"")
    assert [read_batch(path).origin.step for path in batch_files(tmp_path)] == [2, 10, 100_000_000]
    assert choose_batch(tmp_path) == batch_path(tmp_path, 100_000_000)
    assert choose_batch(batch_path(tmp_path, 2)) == batch_path(tmp_path, 2)


def test_a_disk_that_refuses_is_told_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DumpError, match=r"could not be written \(run.dump\)"):
        write_batch(tmp_path / "file", batch())


def test_another_model_is_refused(tmp_path: Path) -> None:
    check_origin(batch(), tmp_path, "shape")
    with pytest.raises(DumpError, match="model of another shape"):
        check_origin(batch(), tmp_path, "other")


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    DumpWriter(tmp_path, "run", "shape", "hash", trains=True)(1, batch().groups, 0, 0)
    DumpWriter(tmp_path, "run", "shape", "hash", trains=True)(1, batch().groups, 0, 0)
    with pytest.raises(DumpError, match="batches of run 'run', this is 'second'"):
        DumpWriter(tmp_path, "second", "shape", "hash", trains=True)


def test_a_run_that_went_back_forgets_the_batches_of_its_abandoned_steps_and_nobody_elses(tmp_path: Path) -> None:
    first = DumpWriter(tmp_path, "run", "shape", "hash", trains=True)
    for step in (1, 2, 3, 4):
        first(step, batch(step).groups, step - 1, step - 1)
    write_batch(tmp_path, batch(step=9, run="other"))
    again = DumpWriter(tmp_path, "run", "shape", "hash", trains=True)
    assert len(batch_files(tmp_path)) == 5, "nothing goes before the run has gone on"
    again(2, batch(7).groups, 1, 1)
    assert [path.name for path in batch_files(tmp_path)] == [f"step-0000000{step}.batch" for step in (1, 2, 9)]
    again(3, batch(8).groups, 2, 2)
    assert len(batch_files(tmp_path)) == 4
    with pytest.raises(DumpError, match="a run of this name with another model"):
        DumpWriter(tmp_path, "run", "another shape", "hash", trains=True)


def test_what_one_policy_played_is_held_to_the_staleness_bound(tmp_path: Path) -> None:
    check_age(tmp_path, 9, 0)
    for step in (1, 2, 3):
        write_batch(tmp_path, batch(step, trained=False))
    check_age(tmp_path, 9, 2)
    check_age(tmp_path, 2, 1)
    with pytest.raises(DumpError, match="would be 2 train steps old, above the bound of 1"):
        check_age(tmp_path, 9, 1)
    write_batch(tmp_path, batch(1, trained=True))
    check_age(tmp_path, 9, 0)  # a run that trained has held them to its own bound


def test_what_is_trained_is_kept_as_it_was_claimed(tmp_path: Path) -> None:
    DumpWriter(tmp_path, "run", "shape", "hash", trains=True)(2, batch(version=5).groups, 6, 12)
    read = read_batch(batch_path(tmp_path, 2))
    assert read.origin == Origin("run", 2, 6, 12, "shape", "hash", True)
    assert {each.max_version for each in read.groups} == {5}


def test_a_run_that_only_plays_has_one_policy_whatever_its_publishes_are_called(tmp_path: Path) -> None:
    """Also after a restart, which publishes the same weights under a later version."""
    writer = DumpWriter(tmp_path, "run", "shape", "hash", trains=False)
    writer(1, [group("a", version=1)], 1, 0)
    writer(2, [group("b", version=2)], 2, 0)
    DumpWriter(tmp_path, "run", "shape", "hash", trains=False)(3, [group("c", version=9)], 9, 0)
    for path in batch_files(tmp_path):
        read = read_batch(path)
        assert (read.origin.policy_version, read.origin.trained) == (1, False)
        assert (read.groups[0].min_version, read.groups[0].max_version) == (1, 1)


def test_renaming_a_version_changes_nothing_else() -> None:
    before, after = group("a", version=3), as_version(group("a", version=3), 0)
    assert after.max_version == 0
    assert encode_batch(Batch(ORIGIN, (as_version(after, 3),))) == encode_batch(Batch(ORIGIN, (before,)))


def test_a_source_gives_a_batch_a_step_and_goes_on_where_a_checkpoint_stands(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no batch is there"):
        DumpSource(tmp_path, "shape", no_rows)
    for step in (5, 6, 9):
        write_batch(tmp_path, batch(step))
    source = DumpSource(tmp_path, "shape", no_rows)
    assert source.restore(train_step=0, checkpoint_id=None, policy_version=0) == 0

    def claimed() -> list[str]:
        return [each.group_id for each in source.claim(1, "trainer", 1.0, 1.0)]

    assert [claimed() for _ in range(4)] == [["g5", "h5"], ["g6", "h6"], ["g9", "h9"], []]
    assert source.commit(1, "step_1", ["g5"], "trainer") == source.renew(["g5"], "trainer", 1.0) == 1
    source.restore(train_step=2, checkpoint_id="step_2", policy_version=2)
    assert claimed() == ["g9", "h9"]
    other = DumpSource(tmp_path, "another", no_rows)
    with pytest.raises(DumpError, match="another shape"):
        other.claim(1, "trainer", 1.0, 1.0)


def test_nothing_travels_where_there_are_no_engines() -> None:
    published = NoEngines().publish(cast(Any, None), 3, 2)
    assert (published.bytes, published.requests) == (0, 0)


def test_the_newest_checkpoint_that_batches_lead_on_from(tmp_path: Path) -> None:
    kept = [Checkpoint(f"step_{n}", tmp_path, Meta(n, n, n, "shape", "hash")) for n in (0, 2, 4, 5)]
    for step in (3, 4, 5):
        write_batch(tmp_path, batch(step))
    assert _start(kept, batch_path(tmp_path, 5), 5).id == "step_4"
    assert _start(kept[:2], batch_path(tmp_path, 5), 5).id == "step_2"
    for found in (kept[:1], kept[3:], []):  # a batch is missing in between; too late; none
        with pytest.raises(DumpError, match="no checkpoint leads to step 5"):
            _start(found, batch_path(tmp_path, 5), 5)


def test_every_difference_is_told() -> None:
    row = group("a").samples[0]
    logprobs = np.linspace(-2, -1, len(row.token_ids), dtype=np.float32)
    record = row_record(row, RowAdvantage(row.rollout_id, 0, 1.0, 0.0, 1.0), logprobs, None)
    result = StepResult(1, 3, {"train/loss": 0.5, "train/ratio/max": float("nan"), "train/tokens_per_s": 1.0}, [record])
    recorded = json.loads('{"train_step": 1, "train/loss": 0.5, "train/ratio/max": null, "train/tokens_per_s": 9}')
    assert differences(result, recorded, [record]) == []
    moved = dataclasses.replace(record, policy_logprobs=np.nextafter(record.policy_logprobs, np.float32(0)))
    (said,) = differences(result, recorded, [moved])
    assert said.startswith("logprobs of a-0 branch 0: at most")
    assert differences(result, recorded | {"train/loss": 0.25}, [record]) == [
        "train/loss: 0.25 then, 0.5 in the replay"
    ]
    assert differences(result, {}, [])[0] == "train/loss: 'not recorded' then, 0.5 in the replay"
    assert "1 in the replay, 0 in both" in differences(result, recorded, [])[0]
