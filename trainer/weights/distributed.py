"""Weights by broadcast: one process group of trainer and engines, a bucket per broadcast.

In: the backend's weights. Out: engines that have them, told by the service, which announces each bucket to them while it is sent. The group
stays from publish to publish until its members change. When an engine fails the group is left at once, since the others hang in it; the
service quarantines the engine, and everything is sent again through a group of another name. Every wait is bounded by `timeout_s`.
"""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from palestra.server.publishing.types import PublishTarget, TargetWorker
from palestra.trainer.types import TrainerError
from palestra.trainer.weights.group import WeightGroup, address_towards
from palestra.trainer.weights.handles import memory_for
from palestra.trainer.weights.layout import BucketPlan
from palestra.trainer.weights.proof import Proof
from palestra.trainer.weights.stream import BucketStream
from palestra.trainer.weights.types import Export, GroupService, Published

TIMEOUT_S = 30.0
"""Longest time of a join, or of one bucket from its first byte to the engines' word that they have it, seconds."""


class _Broken(Exception):
    """The group cannot go on."""


class DistributedCarrier:
    """See `Carrier`."""

    def __init__(
        self, service: GroupService, bucket_bytes: int, *, verify: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._service, self._verify, self._timeout_s = service, verify, timeout_s
        self._device = "cpu"
        self.stream = BucketStream(bucket_bytes, packed=True, allocate=self._allocate)
        self._group: WeightGroup | None = None
        self._members: tuple[TargetWorker, ...] = ()
        self._bodies: dict[int, bytes] = {}
        """What is announced of each bucket, but for the group's name."""
        self.bodies = 0
        """How many of them were made."""
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="weights")

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """See `Carrier`."""
        started = time.monotonic()
        if self.stream.layout is None:
            self._device = memory_for(self._service.publish_target())
        layout = self.stream.prepare(export)
        target = self._service.publish_begin(version, train_step, "distributed")
        requests, faults = 0, list[str]()
        try:
            # Each failure costs an engine; one attempt more is for a failure that was nobody's.
            for _ in range(len(target.workers) + 1):
                proof = Proof(target.kind if self._verify else None)
                try:
                    requests += self._send(export, version, target, proof)
                    break
                except _Broken as fault:
                    faults.append(str(fault))
                    target = self._leave()
            else:
                raise TrainerError(f"version {version} could not be broadcast: {'; '.join(faults)}")
        except BaseException:
            self._service.publish_cancel(version)
            raise
        report = self._service.publish_end(version, None, digests=proof.digests(), dtype=proof.dtype)
        return Published(layout.nbytes, time.monotonic() - started, report.still_s, requests)

    def close(self) -> None:
        """Leaves the group; engines notice when their next one is made."""
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._pool.shutdown(wait=False)

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _send(self, export: Export, version: int, target: PublishTarget, proof: Proof) -> int:
        """All buckets; returns their number."""
        if self._group is None or self._members != target.workers:
            if self._group is not None:
                target = self._leave()
            self._join(target)
        self._service.publish_hold(version)
        sent = 0
        stream = self.stream.run(export, proof.watch)
        try:
            for bucket, flat in stream:
                self._one(bucket, flat)
                sent += 1
        finally:
            stream.close()
        return sent

    def _join(self, target: PublishTarget) -> None:
        size = 1 + sum(worker.ranks for worker in target.workers)
        backend = "nccl" if self._device == "cuda" else "gloo"
        address = address_towards(target.workers[0].url)
        group = WeightGroup(f"weights-{uuid.uuid4().hex[:12]}", address, size, backend, self._timeout_s)
        self._group, self._members = group, target.workers
        told = self._pool.submit(
            self._service.publish_join, group.name, address, group.port, size, backend, self._timeout_s
        )
        self._both(self._pool.submit(group.join), told)

    def _one(self, bucket: BucketPlan, flat: torch.Tensor) -> None:
        group = self._group
        assert group is not None, "joined before the first bucket"
        told = self._pool.submit(self._service.publish_announce, self._body(bucket, group.name))
        self._both(self._pool.submit(group.broadcast, flat), told)

    def _both(self, ours: Future[None], told: Future[dict[str, str]]) -> None:
        """Waits for our side and for the engines' word. On the first failure the group is aborted, which ends the other wait.

        Raises:
            _Broken: who failed, and why.
        """
        fault, pending = "", set[Future[Any]]((ours, told))
        deadline = time.monotonic() + 2 * self._timeout_s
        while pending and not fault:
            done, pending = wait(pending, max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            fault = "; ".join(filter(None, map(_fault_of, done))) if done else "no answer in time"
        if fault:
            assert self._group is not None, "somebody waits in it"
            self._group.abort()
            wait(pending, self._timeout_s)
            raise _Broken(fault)

    def _leave(self) -> PublishTarget:
        group, self._group, self._members = self._group, None, ()
        assert group is not None, "only a joined group is left"
        group.abort()
        return self._service.publish_leave(group.name)

    def _body(self, bucket: BucketPlan, group: str) -> bytes:
        if (fixed := self._bodies.get(bucket.index)) is None:
            self.bodies += 1
            specs = [piece.spec for piece in bucket.pieces]
            about = {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [spec.shape for spec in specs],
                "last": bucket.last,
                "timeout_s": self._timeout_s,
            }
            fixed = self._bodies[bucket.index] = json.dumps(about).encode()[1:]
        return b'{"group": "' + group.encode() + b'", ' + fixed


def _fault_of(done: Future[Any]) -> str:
    if (error := done.exception()) is not None:
        return f"{type(error).__name__}: {error}"
    return "; ".join(done.result().values()) if done.result() else ""
