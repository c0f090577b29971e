"""What the bodies of the control routes hold: the decoder checks types and ranges, and the API's description shows them. Pure.

In: bytes. Out: one of these, or a SessionError 400 that says where the fault is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from palestra.server.gateway.dialects.reading import mended
from palestra.server.types import SessionError

Body = TypeVar("Body")
_MAX = 2**53

Number: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX)]
"""A train step, a policy version."""
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(max_length=4096)]


class WorkerBody(msgspec.Struct):
    """POST /admin/worker: what a worker's environment and program are like. Said again, the weights are new."""

    tasks: Count | None = None
    """How many there are; null: as many as are asked for."""
    weights: list[float] | None = None
    """How often each task is drawn, by its share; null: each once an epoch."""
    reviews: bool = False
    """Whether complete groups are to be reviewed before they are trained."""
    deterministic: bool = False
    """Whether the environment gives the same observations for the same seed and actions."""


class SkipBody(msgspec.Struct):
    """POST /admin/skip: a task that is not to be played. Its place is free again."""

    group_id: Name
    reason: Name = ""


class VerdictBody(msgspec.Struct):
    """POST /admin/verdict: what becomes of a group. Rollouts of it that go on are ended."""

    group_id: Name
    keep: bool = True
    reason: Name = ""
    """Why it is dropped: a word that is counted."""
    rewards: dict[int, float | None] = {}
    """Index of a rollout -> the reward that counts; null: unknown."""


class WorkBody(msgspec.Struct):
    """POST /admin/work."""

    wait_s: Seconds
    reviews_only: bool = False
    """Whether its worker has no place for rollouts."""


class ClaimBody(msgspec.Struct):
    """POST /admin/claim."""

    n: Count
    owner: Name
    ttl_s: Seconds
    wait_s: Seconds
    claim_id: Name | None = None
    """The same in every repetition of one claim."""


class LeaseBody(msgspec.Struct):
    """POST /admin/lease: renews for `ttl_s`, or releases."""

    group_ids: list[Name]
    owner: Name
    release: bool = False
    ttl_s: Seconds | None = None
    """Must be given to renew."""


class CommitBody(msgspec.Struct):
    """POST /admin/commit."""

    step: Number
    checkpoint_id: Name
    group_ids: list[Name]
    owner: Name


class CollectBody(msgspec.Struct):
    """POST /admin/collect."""

    oldest_train_step: Number


class RestoreBody(msgspec.Struct):
    """POST /admin/restore."""

    train_step: Number
    policy_version: Number


class Transcript(msgspec.Struct):
    """A finished conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class RenderBody(msgspec.Struct):
    """POST /admin/render."""

    transcripts: list[Transcript]


BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/admin/worker": WorkerBody,
    "/admin/work": WorkBody,
    "/admin/skip": SkipBody,
    "/admin/verdict": VerdictBody,
    "/admin/claim": ClaimBody,
    "/admin/lease": LeaseBody,
    "/admin/commit": CommitBody,
    "/admin/collect": CollectBody,
    "/admin/restore": RestoreBody,
    "/admin/render": RenderBody,
}
"""By path, for the API's description."""


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """The body of a call; an empty one is `{}`.

    Raises:
        SessionError: 400 with the place of what is wrong.
    """
    try:
        return mended(msgspec.json.Decoder(kind).decode, raw or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SessionError(f"request body: {error}") from None
