"""Handles to the trainer's buffers, read back as engines read them."""

from __future__ import annotations

import base64
import gc
import json
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from palestra.trainer.weights.handles import SegmentHandles, TorchHandles
from palestra.trainer.weights.stream import BucketStream

TENSORS = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.bfloat16), "c": torch.randn(9)}

READER = """
import base64, io, pickle, sys, types
for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync", "sglang.srt.weight_sync.tensor_bucket"):
    sys.modules[name] = types.ModuleType(name)
class FlattenedTensorMetadata: pass
sys.modules["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorMetadata = FlattenedTensorMetadata
import torch, torch.multiprocessing
got = pickle.loads(base64.b64decode(sys.stdin.read()))
flat = got["flattened_tensor"]
for m in got["metadata"]:
    tensor = flat[m.start_idx:m.end_idx].view(m.dtype).reshape(m.shape)
    print(m.name, m.numel, tuple(tensor.shape), float(tensor.double().sum()))
"""


def test_a_segment_says_where_each_tensor_is_and_ends_with_its_owner() -> None:
    handles = SegmentHandles()
    stream = BucketStream(10_000, allocate=handles.allocate)
    ((bucket, flat),) = stream.run(lambda: iter(TENSORS.items()))
    payload = handles.payload(bucket, flat)
    assert handles.payload(bucket, flat) is payload, "made once for all publishes"
    about = json.loads(base64.b64decode(payload))
    segment = SharedMemory(about["shm"])
    try:
        assert segment.buf is not None
        assert [entry["name"] for entry in about["tensors"]] == list(TENSORS)
        for entry in about["tensors"]:
            wanted = TENSORS[entry["name"]]
            raw = bytes(segment.buf[entry["offset"] : entry["offset"] + wanted.nbytes])
            assert raw == wanted.contiguous().view(torch.uint8).numpy().tobytes()
            assert (entry["dtype"], entry["shape"]) == (str(wanted.dtype)[6:], list(wanted.shape))
            assert entry["offset"] + wanted.nbytes <= about["nbytes"] <= segment.size
    finally:
        segment.close()
    del handles, stream, flat
    gc.collect()
    with pytest.raises(FileNotFoundError):
        SharedMemory(about["shm"])


@pytest.mark.walk
def test_torch_handles_are_read_in_another_process_by_sglang_s_class() -> None:
    handles = TorchHandles()
    stream = BucketStream(10_000, allocate=handles.allocate)
    for _ in range(2):  # the buffers serve all publishes
        ((bucket, flat),) = stream.run(lambda: iter(TENSORS.items()))
        said = subprocess.run(
            [sys.executable, "-c", READER],
            input=handles.payload(bucket, flat),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
        assert [line.split(" ", 1)[0] for line in said] == list(TENSORS)
        for line, tensor in zip(said, TENSORS.values(), strict=True):
            assert float(line.rsplit(" ", 1)[1]) == pytest.approx(float(tensor.double().sum()))
    assert "sglang" not in sys.modules
