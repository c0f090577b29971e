"""What clients of a sandbox host may ask for. In: their words. Out: the same, checked, or a refusal. Waits for nothing."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Sequence
from typing import Any

from palestra.sandbox.channel import RUNS
from palestra.sandbox.inside.frames import FrameError
from palestra.sandbox.types import MAX_OUTPUT_BYTES, BoxSpec
from palestra.sandbox.wire import read_frame
from palestra.server.sandbox_host.types import HostRefusal

OPERATIONS = RUNS | {"open", "interrupt", "shut", "clean", "write", "read", "list", "folder", "link"}
"""What a client may ask of an agent: all but what sets the box up."""
BOUNDED = ("memory_bytes", "pids", "disk_bytes", "cpus")
"""Limits that a client may lower, not raise."""
MOST_S = 24 * 3600.0
"""Longest run, seconds."""


def check_spec(spec: BoxSpec, own: BoxSpec, share: Sequence[str] = ()) -> BoxSpec:
    """A client's specification as this host would have it: within its own one, which says what the machine's owner allows. Folders of
    `share` may be mounted too, and packages be taken from them.

    Raises:
        HostRefusal: it is not within.
    """
    for name in BOUNDED:
        wanted, most = getattr(spec.limits, name), getattr(own.limits, name)
        if wanted > most:
            raise _beyond(f"{name} {wanted}", f"at most {most}: sandbox.{name} there")
    allowed = [*(mount.source for mount in own.mounts), *share]
    for mount in spec.mounts:
        if not any(_within(mount.source, source) for source in allowed):
            raise _beyond(f"a mount of {mount.source}", "only what lies in sandbox.mounts or host.share there")
    packages = spec.packages
    if packages not in (None, own.packages) and not any(_within(str(packages), folder) for folder in share):
        raise _beyond(f"packages {packages}", "only its own sandbox.packages, or what lies in host.share")
    if spec.image not in (None, own.image):
        raise _beyond(f"image {spec.image}", f"{own.image}: sandbox.image there")
    return dataclasses.replace(spec, image=own.image)


def _within(path: str, folder: str) -> bool:
    path, folder = posixpath.normpath(path), posixpath.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _beyond(wanted: str, given: str) -> HostRefusal:
    return HostRefusal(f"{wanted} was asked for; this host gives {given}", 422, "spec")


def read_request(body: bytes) -> dict[str, Any]:
    """A request to a box's agent.

    Raises:
        HostRefusal: it is none, or one that clients may not send.
    """
    try:
        request = read_frame(body)
    except FrameError as error:
        raise HostRefusal(str(error), 400, "invalid_request") from None
    operation = request.get("op")
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise HostRefusal(f"op {operation!r}; known: {', '.join(sorted(OPERATIONS))}", 400, "invalid_request")
    if operation in RUNS:
        _bounds(request)
    return request


def _bounds(request: dict[str, Any]) -> None:
    timeout, keep, most = request.get("timeout"), request.get("keep"), request.get("most")
    if not isinstance(timeout, float) or not 0 < timeout <= MOST_S:
        raise HostRefusal(f"timeout {timeout!r}; it must be seconds, at most {MOST_S:g}", 400, "invalid_request")
    if not isinstance(keep, int) or not 0 <= keep <= MAX_OUTPUT_BYTES:
        raise HostRefusal(f"keep {keep!r}; it must be bytes, at most {MAX_OUTPUT_BYTES}", 400, "invalid_request")
    if not isinstance(most, int) or most < keep:
        raise HostRefusal(f"most {most!r}; it must be at least {keep}", 400, "invalid_request")
