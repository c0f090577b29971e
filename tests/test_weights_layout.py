"""Buckets: where tensors lie in them, how they are filled while others travel, and what that costs in memory and time."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.trainer.types import TrainerError
from palestra.trainer.weights.layout import Spec, plan_buckets
from palestra.trainer.weights.stream import BucketStream, spec_of
from palestra.trainer.weights.types import Export

SIZES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


def spec(name: str, numbers: int, dtype: str = "float32") -> Spec:
    return Spec(name, dtype, (numbers,), numbers * SIZES[dtype], SIZES[dtype])


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from(sorted(SIZES))), min_size=1, max_size=40),
    st.integers(1, 1000),
    st.booleans(),
)
def test_every_tensor_has_one_place(sizes: list[tuple[int, str]], limit: int, packed: bool) -> None:
    specs = [spec(f"t{i}", n, dtype) for i, (n, dtype) in enumerate(sizes)]
    layout = plan_buckets(specs, limit, packed=packed)
    assert [piece.spec for bucket in layout.buckets for piece in bucket.pieces] == specs
    assert layout.nbytes == sum(s.nbytes for s in specs)
    assert layout.largest == max(bucket.nbytes for bucket in layout.buckets)
    assert [bucket.last for bucket in layout.buckets] == [False] * (len(layout.buckets) - 1) + [True]
    for bucket in layout.buckets:
        assert bucket.nbytes <= limit or len(bucket.pieces) == 1
        end = 0
        for piece in bucket.pieces:
            assert piece.offset % piece.spec.itemsize == 0
            assert piece.offset == end if packed else (piece.offset >= end and piece.offset % 16 == 0)
            end = piece.offset + piece.spec.nbytes
        assert bucket.nbytes == end


def test_small_tensors_are_merged_and_large_ones_go_alone() -> None:
    specs = [spec("a", 10), spec("b", 10), spec("big", 1000), spec("c", 10)]
    layout = plan_buckets(specs, 200)
    assert [[p.spec.name for p in b.pieces] for b in layout.buckets] == [["a", "b"], ["big"], ["c"]]


def test_a_packed_offset_that_does_not_suit_begins_another_bucket() -> None:
    layout = plan_buckets([spec("a", 3, "float8_e4m3fn"), spec("b", 1)], 100, packed=True)
    assert [[p.spec.name for p in b.pieces] for b in layout.buckets] == [["a"], ["b"]]


def test_no_tensors_and_double_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no weights"):
        plan_buckets([], 10)
    with pytest.raises(ValueError, match="a comes twice"):
        plan_buckets([spec("a", 1), spec("a", 1)], 10)


def tensors(count: int = 7, size: int = 24) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.randn(size)) for i in range(count)]


def unpacked(stream: BucketStream, given: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    out = {}
    for bucket, flat in stream.run(lambda: iter(given)):
        for piece in bucket.pieces:
            raw = flat[piece.offset : piece.offset + piece.spec.nbytes]
            out[piece.spec.name] = raw.view(getattr(torch, piece.spec.dtype)).reshape(piece.spec.shape).clone()
    return out


def test_what_comes_out_is_what_went_in() -> None:
    given = [*tensors(), ("half", torch.randn(3, 5).bfloat16()), ("turned", torch.randn(4, 6).t())]
    stream = BucketStream(250)
    for _ in range(2):
        given = [(name, tensor + 1) for name, tensor in given]
        out = unpacked(stream, given)
        assert list(out) == [name for name, _ in given]
        assert all(torch.equal(out[name], tensor) for name, tensor in given)
    assert stream.layouts == 1, "the second publish computes no metadata"


def test_the_next_bucket_is_filled_while_one_is_used() -> None:
    """The consumer holds bucket 0 until the last tensor of bucket 1 has been taken; bucket 2 waits for a buffer."""
    taken = [threading.Event() for _ in range(6)]
    given = tensors(6)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for event, pair in zip(taken, given, strict=True):
            event.set()
            yield pair

    stream = BucketStream(200)  # two tensors each
    stream.prepare(export)
    for event in taken:
        event.clear()
    running = stream.run(export)
    next(running)
    assert taken[3].wait(10)
    assert not taken[4].is_set(), "there are two buffers"
    assert [bucket.index for bucket, _ in running] == [1, 2]


def test_a_changed_layout_is_an_error() -> None:
    given = tensors()
    stream = BucketStream(250)
    unpacked(stream, given)
    for changed in (given[:-1], [*given, ("new", torch.zeros(1))], [*given[:-1], ("t6", torch.zeros(23))]):
        with pytest.raises(TrainerError, match="changed their layout"):
            unpacked(stream, changed)
    assert unpacked(stream, given).keys() == dict(given).keys()


def test_a_consumer_that_stops_ends_the_thread_and_faults_come_through() -> None:
    stream, given = BucketStream(250), tensors(50)
    running = stream.run(lambda: iter(given))
    next(running)
    running.close()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from given[:20]
        raise RuntimeError("gathering failed")

    with pytest.raises(RuntimeError, match="gathering failed"):
        for _ in stream.run(broken):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


def experts(layers: int) -> Export:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
        for layer in range(layers)
        for expert in range(256)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    base = torch.arange(len(names) * 16, dtype=torch.float32).view(len(names), 4, 4)
    return lambda: ((name, base[i]) for i, name in enumerate(names))


@pytest.mark.walk
def test_a_model_of_61_layers_with_256_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """47k tiny tensors: a few buckets instead of 47k requests, and no metadata the second time."""
    export, limit = experts(61), 256 * 1024
    merged = BucketStream(limit)
    single = BucketStream(1)
    count, seconds = [], []
    for stream in (merged, single):
        layout = stream.prepare(export)
        started = time.perf_counter()
        count.append(sum(1 for _ in stream.run(export)))
        seconds.append(time.perf_counter() - started)
        assert count[-1] == len(layout.buckets)
        assert stream.layouts == 1
    assert count == [12, 46_848]
    assert sum(buffer.nbytes for buffer in merged.buffers) <= 2 * limit
    with capsys.disabled():
        print(f"\n  46,848 tensors: {count[0]} buckets in {seconds[0]:.2f} s, one by one {seconds[1]:.2f} s")


def test_memory_beside_the_weights_is_two_buckets() -> None:
    export, limit = experts(4), 64 * 1024
    stream = BucketStream(limit)
    stream.prepare(export)
    assert sum(buffer.nbytes for buffer in stream.buffers) <= 2 * limit
    for _ in stream.run(export):  # what python keeps of a first run (names of dtypes, caches) is no bucket
        pass
    tracemalloc.start()
    for _ in stream.run(export):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < limit, "nothing is built per tensor and kept"


def test_specs_name_dtypes_as_engines_do() -> None:
    assert spec_of("w", torch.zeros(2, 3, dtype=torch.bfloat16)) == Spec("w", "bfloat16", (2, 3), 12, 2)
