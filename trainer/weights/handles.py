"""Weights by handle, on one host: engines read the trainer's own buffers, and only their addresses travel.

In: the backend's weights. Out: engines that have copied each bucket before the next one takes its place. For SGLang a handle is torch's: a
pickled tensor in shared memory, or of CUDA IPC, in the form of its flattened buckets. The embedded engine reads no pickles: it gets JSON
with the name of a POSIX shared memory segment and each tensor's place in it, which the trainer owns until it ends.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import time
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import torch
import torch.multiprocessing

from palestra.server.publishing.types import PublishTarget
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.layout import BucketPlan
from palestra.trainer.weights.proof import Proof
from palestra.trainer.weights.stream import BucketStream
from palestra.trainer.weights.types import Export, HandleService, Published

FLATTENED, SHARED = "flattened_bucket", "shared_memory"
_MODULE, _CLASS = "sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"


class Handles(Protocol):
    """Memory that engines of one kind can read."""

    load_format: str

    def allocate(self, size: int) -> torch.Tensor:
        """A flat buffer of uint8."""

    def payload(self, bucket: BucketPlan, flat: torch.Tensor) -> str:
        """What one rank needs to read the bucket, base64. A payload is read once."""


class TorchHandles:
    """SGLang's form: {"flattened_tensor": uint8, "metadata": [...]}, pickled, the tensor by handle."""

    load_format = FLATTENED

    def __init__(self, device: str = "cpu") -> None:
        """`device`: where the buffers are; cuda for engines on the same GPU's host."""
        self._device = device
        self._metadata: dict[int, list[Any]] = {}
        self._kind: Any = type(_CLASS, (), {"__module__": _MODULE})

    def allocate(self, size: int) -> torch.Tensor:
        """See `Handles`."""
        if self._device != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        # By name: a descriptor would have to be passed through a socket of ours. The manager that looks after the names outlives this
        # process and would hold its output open.
        with _output_to_nowhere():
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            flat: torch.Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
            return flat

    def payload(self, bucket: BucketPlan, flat: torch.Tensor) -> str:
        """See `Handles`. Pickled anew for each reader, since torch counts readers by it."""
        if (metadata := self._metadata.get(bucket.index)) is None:
            metadata = self._metadata[bucket.index] = [self._about(piece) for piece in bucket.pieces]
        buffer = io.BytesIO()
        with _module_of(self._kind):
            ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
        return base64.b64encode(buffer.getvalue()).decode()

    def _about(self, piece: Any) -> Any:
        spec, about = piece.spec, self._kind()
        about.__dict__.update(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=piece.offset,
            end_idx=piece.offset + spec.nbytes,
            numel=spec.nbytes,
        )
        return about


class SegmentHandles:
    """The embedded engine's form: JSON about a named segment."""

    load_format = SHARED

    def __init__(self) -> None:
        self._segments: dict[int, SharedMemory] = {}
        """By the address of their memory."""
        self._payloads: dict[tuple[int, int], str] = {}
        self._end = weakref.finalize(self, _unlink, self._segments)

    def allocate(self, size: int) -> torch.Tensor:
        """See `Handles`.

        Raises:
            TrainerError: there is no room in /dev/shm.
        """
        try:
            segment = SharedMemory(create=True, size=size)
            os.posix_fallocate(segment._fd, 0, size)  # type: ignore[attr-defined]
        except OSError as error:
            raise TrainerError(
                f"no {size:,} bytes of shared memory for weights (is /dev/shm full?): {error}"
            ) from error
        assert segment.buf is not None, "a segment that was just made is mapped"
        flat = torch.frombuffer(segment.buf, dtype=torch.uint8)[:size]
        self._segments[flat.data_ptr()] = segment
        return flat

    def payload(self, bucket: BucketPlan, flat: torch.Tensor) -> str:
        """See `Handles`. The same for all readers and publishes."""
        key = bucket.index, flat.data_ptr()
        if (made := self._payloads.get(key)) is None:
            tensors = [
                {"name": p.spec.name, "dtype": p.spec.dtype, "shape": p.spec.shape, "offset": p.offset}
                for p in bucket.pieces
            ]
            about = {"shm": self._segments[flat.data_ptr()].name, "nbytes": bucket.nbytes, "tensors": tensors}
            made = self._payloads[key] = base64.b64encode(json.dumps(about).encode()).decode()
        return made


def memory_for(target: PublishTarget) -> str:
    """Where buffers lie that these engines take: on the GPU where both sides compute on one, in host memory otherwise."""
    return "cuda" if target.device == "cuda" and torch.cuda.is_available() else "cpu"


class TensorCarrier:
    """See `Carrier`."""

    def __init__(self, service: HandleService, bucket_bytes: int, *, verify: bool = True) -> None:
        self._service, self._verify, self._bucket_bytes = service, verify, bucket_bytes
        self._handles: Handles | None = None
        self.stream: BucketStream | None = None

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """See `Carrier`."""
        started = time.monotonic()
        target = self._service.publish_begin(version, train_step, "tensor")
        proof, requests = Proof(target.kind if self._verify else None), 0
        try:
            handles, stream = self._ready(target)
            layout = stream.prepare(export)
            self._service.publish_hold(version)
            for bucket, flat in (running := stream.run(export, proof.watch)):
                try:
                    payloads = {
                        worker.url: [handles.payload(bucket, flat) for _ in range(worker.ranks)]
                        for worker in target.workers
                    }
                    self._service.publish_handles(payloads, handles.load_format, last=bucket.last)
                except BaseException:
                    running.close()
                    raise
                requests += 1
        except BaseException:
            self._service.publish_cancel(version)
            raise
        report = self._service.publish_end(version, None, digests=proof.digests(), dtype=proof.dtype)
        return Published(layout.nbytes, time.monotonic() - started, report.still_s, requests)

    def _ready(self, target: PublishTarget) -> tuple[Handles, BucketStream]:
        if self._handles is None or self.stream is None:
            self._handles = SegmentHandles() if target.kind == "embedded" else TorchHandles(memory_for(target))
            self.stream = BucketStream(self._bucket_bytes, allocate=self._handles.allocate)
        return self._handles, self.stream


@contextmanager
def _module_of(kind: type) -> Iterator[None]:
    """While something of SGLang's class is pickled: pickle looks the class up in its module, which is not installed here."""
    parts = _MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: types.ModuleType(name) for name in names})
    setattr(sys.modules[_MODULE], _CLASS, kind)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def _output_to_nowhere() -> Iterator[None]:
    """While a child is started that must not have our stdout and stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (nowhere, *kept):
            os.close(descriptor)


def _unlink(segments: dict[int, SharedMemory]) -> None:
    for segment in segments.values():
        # Only the name: the memory goes with its last mapping, and tensors may still look into ours.
        segment.unlink()
        segment._buf = segment._mmap = None  # type: ignore[attr-defined]
