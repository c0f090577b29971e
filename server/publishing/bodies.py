"""What the bodies of the publish routes hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from palestra.server.control_bodies import Count, Name, Number, Seconds
from palestra.server.publishing.types import Transport

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class BeginBody(msgspec.Struct):
    """POST /admin/publish/begin."""

    version: Number
    train_step: Number
    transport: Transport = "disk"


class VersionBody(msgspec.Struct):
    """POST /admin/publish/hold, POST /admin/publish/cancel."""

    version: Number


class JoinBody(msgspec.Struct):
    """POST /admin/publish/join: the trainer's process group, of which it is rank 0."""

    group: Name
    """A name that was never used for another group."""
    address: Name
    port: Port
    world_size: Count
    backend: Literal["gloo", "nccl"]
    timeout_s: Seconds
    """How long an engine may take."""


class AnnounceBody(msgspec.Struct):
    """POST /admin/publish/announce: a bucket that is being broadcast."""

    group: Name
    names: list[Name]
    dtypes: list[Name]
    shapes: list[list[Number]]
    last: bool
    """Whether it is the publish's last one."""
    timeout_s: Seconds


class LeaveBody(msgspec.Struct):
    """POST /admin/publish/leave: the trainer gave this group up."""

    group: Name


class HandlesBody(msgspec.Struct):
    """POST /admin/publish/handles: a bucket in memory that trainer and engines share."""

    payloads: dict[str, list[str]]
    """Engine -> what each of its ranks reads, base64."""
    load_format: Name
    last: bool


class EndBody(msgspec.Struct):
    """POST /admin/publish/end."""

    version: Number
    path: Name | None = None
    """The folder of the weights, of a delta the shared folder that agents pull from; None: weights that came otherwise."""
    digests: dict[str, tuple[str, tuple[int, ...]]] | None = None
    """What every engine must have, by its own names; None: only the version is verified."""
    dtype: Name = "float32"
    """What the digests' bytes are."""


class CanaryBody(msgspec.Struct):
    """POST /admin/publish/canary: the trainer's own logprobs of a short text."""

    version: Number
    ids: Annotated[list[Number], Meta(min_length=2, max_length=4096)]
    logprobs: list[float]
    """Of every id but the first."""


BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/admin/publish/begin": BeginBody,
    "/admin/publish/hold": VersionBody,
    "/admin/publish/join": JoinBody,
    "/admin/publish/announce": AnnounceBody,
    "/admin/publish/leave": LeaveBody,
    "/admin/publish/handles": HandlesBody,
    "/admin/publish/end": EndBody,
    "/admin/publish/cancel": VersionBody,
    "/admin/publish/canary": CanaryBody,
}
"""By path, for the API's description."""
