"""Weights as a stream of filled buckets: a thread fills bucket n + 1 while bucket n is on its way.

In: passes over the weights. Out: (bucket, bytes) one after the other, in two flat buffers that serve all publishes: memory beside the
weights is two buckets. The layout is computed at the first pass and only compared afterwards. The consumer has a bucket's bytes until it
asks for the next one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator

import torch

from palestra.trainer.types import TrainerError
from palestra.trainer.weights.layout import BucketLayout, BucketPlan, Spec, plan_buckets
from palestra.trainer.weights.types import Export

BUFFERS = 2
Allocate = Callable[[int], torch.Tensor]
"""Makes a flat uint8 tensor of so many bytes, in whatever memory the transport needs."""
Watch = Callable[[str, torch.Tensor], None]
"""Is shown every tensor as it lies in its bucket, in the order of the export."""


class _Stopped(Exception):
    """The consumer wants no more."""


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """A tensor's name, dtype, shape and size."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Spec(name, dtype, tuple(tensor.shape), tensor.nbytes, tensor.element_size())


def _is(spec: Spec, name: str, tensor: torch.Tensor) -> bool:
    """As `spec_of(name, tensor) == spec`, but for tens of thousands of tensors a publish."""
    return name == spec.name and tensor.shape == spec.shape and tensor.dtype is getattr(torch, spec.dtype)


def plain(size: int) -> torch.Tensor:
    """A buffer in the process's own memory."""
    return torch.empty(size, dtype=torch.uint8)


class BucketStream:
    """The buckets of one model, publish after publish."""

    def __init__(self, limit: int, *, packed: bool = False, allocate: Allocate = plain) -> None:
        """`limit`: bytes of a bucket; see `plan_buckets` for `packed`."""
        self._limit, self._packed, self._allocate = limit, packed, allocate
        self.layout: BucketLayout | None = None
        """Computed by the first `prepare`."""
        self.layouts = 0
        """How often a layout was computed."""
        self.buffers: list[torch.Tensor] = []
        """Bucket n is in buffer n modulo their number."""

    def prepare(self, export: Export) -> BucketLayout:
        """The layout and the buffers; a pass over the weights the first time, nothing afterwards.

        Raises:
            TrainerError: there is nothing to publish.
        """
        if self.layout is None:
            self.layouts += 1
            try:
                specs = (spec_of(name, tensor) for name, tensor in export())
                self.layout = plan_buckets(specs, self._limit, packed=self._packed)
            except ValueError as error:
                raise TrainerError(f"weights cannot be published: {error}") from error
            count = min(BUFFERS, len(self.layout.buckets))
            self.buffers = [self._allocate(self.layout.largest) for _ in range(count)]
        return self.layout

    def run(self, export: Export, watch: Watch | None = None) -> Generator[tuple[BucketPlan, torch.Tensor]]:
        """One pass over the weights. Close the iterator, or read it to its end: a thread works behind it.

        Raises:
            TrainerError: the weights have other names, dtypes or shapes than at the first pass.
        """
        layout = self.prepare(export)
        free: queue.Queue[bool] = queue.Queue()
        """True for a buffer to be filled, False: no more is wanted."""
        filled: queue.Queue[BucketPlan | BaseException] = queue.Queue()
        for _ in self.buffers:
            free.put(True)
        filler = threading.Thread(
            target=self._fill, args=(export, layout, free, filled, watch), name="weights", daemon=True
        )
        filler.start()
        try:
            for _ in layout.buckets:
                got = filled.get()
                if isinstance(got, BaseException):
                    raise got
                yield got, self._slot(got)[: got.nbytes]
                free.put(True)
            # The thread still has to see that the export is at its end too.
            if isinstance(end := filled.get(), BaseException) and not isinstance(end, _Stopped):
                raise end
        finally:
            free.put(False)
            filler.join()

    def _slot(self, bucket: BucketPlan) -> torch.Tensor:
        return self.buffers[bucket.index % len(self.buffers)]

    def _fill(
        self,
        export: Export,
        layout: BucketLayout,
        free: queue.Queue[bool],
        filled: queue.Queue[BucketPlan | BaseException],
        watch: Watch | None,
    ) -> None:
        try:
            tensors = export()
            for bucket in layout.buckets:
                if not free.get():
                    raise _Stopped
                flat = self._slot(bucket)
                for piece in bucket.pieces:
                    name, tensor = next(tensors, ("", torch.empty(0)))
                    if not _is(piece.spec, name, tensor):
                        raise TrainerError(
                            f"the weights changed their layout: {spec_of(name, tensor)} came, not {piece.spec}"
                        )
                    place = flat[piece.offset : piece.offset + piece.spec.nbytes].view(tensor.dtype)
                    placed = place.view(tensor.shape)
                    placed.copy_(tensor.detach())
                    if watch is not None:
                        watch(name, placed)
                filled.put(bucket)
            if (extra := next(tensors, None)) is not None:
                raise TrainerError(f"the weights changed their layout: {extra[0]} is new")
            filled.put(_Stopped())
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            filled.put(error)
