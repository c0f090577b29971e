"""Groups to bytes and back, bit for bit; damage is always noticed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.types import (
    SampleError,
    StoreError,
    TokenSource,
    TrainingSample,
    TrajectoryGroup,
    VersionSpan,
)
from palestra.server.wire.checksum import checksum
from palestra.server.wire.codec import check_bytes, decode_group, encode_group, join_blobs, split_blobs
from tests.fakes.rollouts import group


def same_row(a: TrainingSample, b: TrainingSample) -> bool:
    for field in dataclasses.fields(a):
        was, now = getattr(a, field.name), getattr(b, field.name)
        if isinstance(was, np.ndarray):
            if was.dtype != now.dtype or was.shape != now.shape or was.tobytes() != now.tobytes():
                return False
        elif was != now:
            return False
    return True


@st.composite
def rows(draw: st.DrawFn) -> TrainingSample:
    n = draw(st.integers(1, 40))
    sources = np.array(draw(st.lists(st.sampled_from(list(TokenSource)), min_size=n, max_size=n)), np.uint8)
    wished = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    trainable = (sources == TokenSource.SAMPLED) | (sources == TokenSource.DEMO)
    logprobs = np.array(
        draw(st.lists(st.floats(-30, 0, width=32) | st.just(float("nan")), min_size=n, max_size=n)), np.float32
    )
    mask = (wished & trainable & ((sources == TokenSource.DEMO) | np.isfinite(logprobs))).astype(np.uint8)
    return TrainingSample(
        rollout_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        attempt=draw(st.integers(0, 3)),
        group_id="g",
        task_id="t",
        branch=draw(st.integers(0, 9)),
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32),
        loss_mask=mask,
        sources=sources,
        logprobs=logprobs,
        spans=(VersionSpan(draw(st.integers(0, 2**40)), 0, n),),
        temperature=draw(st.floats(0.1, 2)),
        reward=draw(st.none() | st.floats(-1, 1)),
        turn_rewards=tuple(draw(st.lists(st.none() | st.floats(-1, 1), max_size=3))),
        stop_reason="answer",
        routed_experts=draw(st.sampled_from([None, np.arange((n - 1) * 6, dtype=np.int16).reshape(n - 1, 2, 3)])),
    )


@given(st.lists(rows(), max_size=4))
@settings(max_examples=30, deadline=None)
def test_round_trip_is_exact(samples: list[TrainingSample]) -> None:
    before = TrajectoryGroup("g", "t", 4, tuple(samples), {"r": 0.1})
    after = decode_group(encode_group(before))
    assert (after.group_id, after.task_id, after.group_size, after.rewards) == ("g", "t", 4, {"r": 0.1})
    assert len(after.samples) == len(samples)
    assert all(same_row(a, b) for a, b in zip(samples, after.samples, strict=True))


def test_any_flipped_bit_and_any_cut_is_noticed() -> None:
    blob = encode_group(group("g"))
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 0x10
        with pytest.raises(StoreError):
            decode_group(bytes(damaged))
        with pytest.raises(StoreError):
            decode_group(blob[:at])


def test_a_newer_format_says_so() -> None:
    blob = bytearray(encode_group(group("g")))
    blob[3] = 9
    with pytest.raises(StoreError, match="format 9"):
        check_bytes(bytes(blob))


def test_nonsense_with_a_right_checksum_is_a_store_error() -> None:
    blob = bytearray(encode_group(group("g")))
    blob[16:20] = b"\xff" * 4
    size = int.from_bytes(blob[4:8], "little")
    blob[8:16] = checksum(memoryview(blob)[16:], size).to_bytes(8, "little")
    with pytest.raises(StoreError, match=r"damaged group: (?!the checksum)"):
        decode_group(bytes(blob))


def test_a_checksum_notices_words_that_change_places_within_a_block_and_blocks_that_do() -> None:
    words = np.random.Generator(np.random.PCG64(1)).integers(0, 2**63, 3 * 8_192, dtype=np.uint64)
    seen = {checksum(words.tobytes(), 5), checksum(words.tobytes(), 6), checksum(words[:-1].tobytes(), 5)}
    swapped = words.copy()
    swapped[[7, 8]] = swapped[[8, 7]]
    blocks = words.reshape(3, -1)[[1, 0, 2]]
    seen |= {checksum(swapped.tobytes(), 5), checksum(blocks.tobytes(), 5)}
    assert len(seen) == 5
    assert checksum(b"", 5) == 5
    with pytest.raises(ValueError, match="whole number of words"):
        checksum(b"seven b", 0)


def test_packing_is_smaller_than_the_arrays() -> None:
    one = group("g", size=1, tokens=2000)
    assert len(encode_group(one)) < 2000 * 8 + 300, "ids and logprobs, and hardly anything for mask and sources"


def test_a_mask_of_two_is_refused() -> None:
    row = group("g").samples[0]
    odd = dataclasses.replace(row, loss_mask=row.loss_mask * 2)
    with pytest.raises(SampleError, match="more than 0 and 1"):
        encode_group(TrajectoryGroup("g", "t", 1, (odd,)))


def test_blobs_travel_together() -> None:
    blobs = [encode_group(group("a")), b"", encode_group(group("b"))]
    body = join_blobs(blobs)
    assert split_blobs(body) == blobs
    assert split_blobs(b"") == []
    for cut in (3, len(body) - 1):
        with pytest.raises(StoreError, match="in the middle"):
            split_blobs(body[:cut])


def test_rows_that_a_store_wrote_itself_come_out_alike_without_being_checked_again() -> None:
    before = group("g", tokens=9)
    checked, trusted = decode_group(encode_group(before)), decode_group(encode_group(before), ours=True)
    for one, other in zip(checked.samples, trusted.samples, strict=True):
        assert all(
            np.array_equal(getattr(one, f.name), getattr(other, f.name), equal_nan=f.name == "logprobs")
            for f in dataclasses.fields(one)
        )
    damaged = bytearray(encode_group(before))
    damaged[-1] ^= 1
    with pytest.raises(StoreError, match="checksum"):
        decode_group(bytes(damaged), ours=True)
