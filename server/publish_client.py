"""A trainer's calls of a publish, over the service's control routes. Blocking and thread-safe.

In: what the trainer is about to do with its weights. Out: the service's words. Waits for the engines: the service bounds that, and a call
that is never answered ends after `WAIT_S`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.server.publishing.types import Digests, PublishReport, PublishTarget, TargetWorker

WAIT_S = 900.0
"""Longest wait for one answer, seconds."""


class PublishCalls:
    """What `ServiceClient` has for publishes."""

    def _json(
        self, method: str, path: str, body: Any = None, *, retry: bool = True, timeout_s: float | None = None
    ) -> Any:
        raise NotImplementedError

    def _publish(self, step: str, body: Any, *, retry: bool = False) -> Any:
        return self._json("POST", f"/admin/publish/{step}", body, retry=retry, timeout_s=WAIT_S)

    def publish_target(self) -> PublishTarget:
        """Which engines would get weights."""
        return _target(self._json("GET", "/admin/publish/target"))

    def publish_begin(self, version: int, train_step: int, transport: str = "disk") -> PublishTarget:
        """Opens the publish of `version`, the weights of `train_step`; says which engines take part."""
        body = {"version": version, "train_step": train_step, "transport": transport}
        return _target(self._publish("begin", body, retry=True))

    def publish_hold(self, version: int) -> None:
        """Has the engines stand still."""
        self._publish("hold", {"version": version}, retry=True)

    def publish_bucket(self, blob: bytes) -> None:
        """A part of the weights by value, as safetensors (embedded engines only)."""
        self._publish("bucket", blob)

    def publish_handles(self, payloads: Mapping[str, Sequence[str]], load_format: str, *, last: bool) -> None:
        """A bucket in shared memory: engine URL -> what each of its ranks reads."""
        self._publish("handles", {"payloads": payloads, "load_format": load_format, "last": last})

    def publish_join(
        self, group: str, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> dict[str, str]:
        """Has the engines join a process group while its rank 0 joins too; who failed, and why."""
        body = {"group": group, "address": address, "port": port, "world_size": world_size}
        said = self._publish("join", {**body, "backend": backend, "timeout_s": timeout_s})
        return dict(said["failed"])

    def publish_announce(self, body: bytes) -> dict[str, str]:
        """Names the tensors of the bucket that is being broadcast meanwhile; `body` is an `AnnounceBody` as JSON. Who failed, and why."""
        return dict(self._publish("announce", body)["failed"])

    def publish_leave(self, group: str) -> PublishTarget:
        """Says that rank 0 left the group; which engines are left."""
        return _target(self._publish("leave", {"group": group}))

    def publish_end(
        self, version: int, path: str | None, *, digests: Digests | None = None, dtype: str = "float32"
    ) -> PublishReport:
        """Puts the weights in force: those in the folder `path` (of a delta: what agents make of the shared folder), or those that were
        sent. `digests`: what every engine must have, of tensors of `dtype`."""
        body = {"version": version, "path": path, "digests": digests, "dtype": dtype}
        return PublishReport(**self._publish("end", body))

    def publish_cancel(self, version: int) -> None:
        """Gives the publish of `version` up; engines go on."""
        self._publish("cancel", {"version": version}, retry=True)

    def publish_canary(self, version: int, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, float]:
        """Compares the trainer's logprobs of `ids` (of all but the first) with the engines'; the largest difference of each."""
        body = {"version": version, "ids": list(ids), "logprobs": list(logprobs)}
        return dict(self._publish("canary", body, retry=True)["gaps"])


def _target(said: Mapping[str, Any]) -> PublishTarget:
    workers = tuple(TargetWorker(worker["url"], worker["ranks"]) for worker in said["workers"])
    return PublishTarget(said["kind"], said["device"], workers)
