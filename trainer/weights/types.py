"""Words of the data half of a publish. torch is only named for type checkers: importing this loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from palestra.server.publishing.types import Digests, PublishReport, PublishTarget

Export: TypeAlias = "Callable[[], Iterator[tuple[str, torch.Tensor]]]"
"""Starts one pass over the present weights: Hugging Face name and tensor, in the same order with the same shapes every time."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one publish took."""

    bytes: int
    """Of the weights that travelled (of a delta: what was written)."""
    seconds: float
    """From the first byte to the new version in force."""
    still_s: float
    """How long the engines stood still meanwhile."""
    requests: int
    """Calls of the service that carried or announced weights."""


class FolderService(Protocol):
    """The service's publish calls that folders need."""

    def publish_target(self) -> PublishTarget:
        """Which engines would get weights."""

    def publish_begin(self, version: int, train_step: int, transport: str = "disk") -> PublishTarget:
        """Opens the publish of a version; engines go on. Says who takes part."""

    def publish_end(
        self, version: int, path: str | None, *, digests: Digests | None = None, dtype: str = "float32"
    ) -> PublishReport:
        """Loads the folder at `path`, or completes what was sent; returns when the engines have the new version."""


class HeldService(FolderService, Protocol):
    """Those that weights need which travel while engines stand still."""

    def publish_hold(self, version: int) -> None:
        """Has the engines stand still, as the update mode says."""

    def publish_cancel(self, version: int) -> None:
        """Gives a publish up; engines go on."""


class HandleService(HeldService, Protocol):
    """Those that handles need."""

    def publish_handles(self, payloads: Mapping[str, Sequence[str]], load_format: str, *, last: bool) -> None:
        """A bucket in memory that engines share: engine URL -> what each of its ranks reads. Returns when they have read it."""


class GroupService(HeldService, Protocol):
    """Those that a broadcast needs."""

    def publish_join(
        self, group: str, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> dict[str, str]:
        """Has the engines join a process group while its rank 0 joins too; who failed, and why."""

    def publish_announce(self, body: bytes) -> dict[str, str]:
        """Names the tensors of the bucket that is broadcast meanwhile; who failed, and why."""

    def publish_leave(self, group: str) -> PublishTarget:
        """Says that rank 0 left the group; which engines are left."""


class Carrier(Protocol):
    """One way for weights to travel."""

    def publish(self, export: Export, version: int, train_step: int) -> Published:
        """Makes the present weights the engines' `version`; returns when the service says that it is so.

        Raises:
            TrainerError: the weights could not be written, sent, or read back differently.
        """
