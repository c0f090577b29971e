"""The buffer's benchmark: its groups are such as the service takes, and what is wrong is noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import buffer_crash
from benchmarks.buffer_cells import FULL, QUICK, Scale, Taken, _beside, _figures
from benchmarks.buffer_groups import LENGTHS, make_group, same, write_record
from benchmarks.buffer_stage import EMBEDDED, HTTP, PEER, POSTGRES
from benchmarks.buffer_stores import InProcess
from palestra.server.buffer.embedded import EmbeddedBuffer
from palestra.server.plan.handmade import check_on_record
from palestra.server.store.reader import StoreReader
from palestra.server.types import SampleError, TokenSource, TrajectoryGroup

SHORT = LENGTHS[0]


def test_groups_are_what_the_record_says_of_them(tmp_path: Path) -> None:
    write_record(tmp_path, [("a", 64, 0), ("b", 64, 5)])
    reader = StoreReader(tmp_path)
    try:
        check_on_record([make_group("a", 64, 0), make_group("b", 64, 5)], reader)
        with pytest.raises(SampleError):
            check_on_record([make_group("a", 64, 1)], reader)
    finally:
        reader.close()


def test_half_of_each_row_is_sampled_by_turns() -> None:
    for row in make_group("a", SHORT, 0).samples:
        assert (len(row.token_ids), int(row.loss_mask.sum()), len(row.spans)) == (SHORT, SHORT // 2, 8)


@pytest.mark.parametrize(
    ("field", "at", "value"),
    [("token_ids", -1, 0), ("loss_mask", -1, 0), ("sources", 0, TokenSource.OBSERVATION), ("logprobs", -1, 0.0)],
)
def test_any_changed_array_makes_another_group(field: str, at: int, value: float) -> None:
    group = make_group("a", 64, 0)
    assert same(group, make_group("a", 64, 4)), "kinds come round"
    array = getattr(group.samples[3], field).copy()
    array[at] = value
    rows = [*group.samples]
    rows[3] = dataclasses.replace(rows[3], **{field: array})
    assert not same(dataclasses.replace(group, samples=tuple(rows)), group)


def _left(folder: Path, *, committed: int) -> list[str]:
    """Eight groups in a store, of which so many are committed; their names."""
    groups = [make_group(f"k0-{index}", SHORT, index) for index in range(8)]
    buffer = EmbeddedBuffer(folder)
    store = InProcess(buffer)
    store.put(groups)
    store.take(committed)
    with pytest.raises(RuntimeError, match="0 of 1 groups were new"):
        store.put(groups[:1])
    buffer.claim(2, "killed", 3600.0)
    buffer.close()
    return [group.group_id for group in groups]


def test_a_sound_store_has_no_faults(tmp_path: Path) -> None:
    names = _left(tmp_path, committed=3)
    assert buffer_crash._check(tmp_path, {"put": set(names), "committed": set(names[:3])}) == []


def test_what_is_lost_or_undone_is_said(tmp_path: Path) -> None:
    names = _left(tmp_path, committed=3)
    said = {"put": {*names, "gone"}, "committed": set(names[:4])}
    assert buffer_crash._check(tmp_path, said) == [
        "1 acknowledged groups are lost",
        "1 acknowledged commits are undone",
    ]


def test_a_changed_group_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _left(tmp_path, committed=3)

    def other(name: str, tokens: int, kind: int) -> TrajectoryGroup:
        return make_group(name, tokens, kind + (name == "k0-5"))

    monkeypatch.setattr(buffer_crash, "make_group", other)
    said = {"put": set(names), "committed": set(names[:3])}
    assert buffer_crash._check(tmp_path, said) == ["k0-5 came back as another"]


def test_figures_are_medians_and_ratios_are_of_the_best() -> None:
    found = [Taken(rate, 2 * rate, (0.1, 0.2), (0.3, rate)) for rate in (10.0, 1000.0, 30.0)]
    figures = _figures(found)
    assert (figures["put_per_s"], figures["take_per_s"]) == (30, 60)
    assert (figures["in"], figures["out"], figures["of_server"]["out"]) == (0.3, 30.3, 30.0)
    peer = {"2048": {"by_1": {"put_per_s": 2.0, "take_per_s": 5.0}, "by_8": {"put_per_s": 3.0, "take_per_s": 4.0}}}
    beside = _beside({EMBEDDED: {"2048": {"by_8": figures}, "16384": {}}, PEER: peer}, PEER)
    assert beside["put_per_s"] == {"2048": 3.0}
    assert beside["ours_to_it"] == {EMBEDDED: {"2048": {"put_per_s": 10.0, "take_per_s": 12.0}}}


@pytest.mark.parametrize("scale", [QUICK, FULL])
def test_stores_take_turns_and_names_are_never_used_twice(scale: Scale) -> None:
    cells = scale.cells
    assert [cell.store for cell in cells[:3]] == [EMBEDDED, POSTGRES, HTTP]
    assert [(cell.tokens, cell.batch) for cell in cells] == sorted((cell.tokens, cell.batch) for cell in cells)
    names = [name for turn in (0, 1) for cell in cells for name in cell.names(turn)]
    assert len(set(names)) == len(names)
    assert len(names) == 2 * sum(cell.batch * cell.calls for cell in cells)
