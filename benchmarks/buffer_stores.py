"""Where groups are put and taken from, each with the CPU time that it costs: a buffer in this process, or the service over HTTP.

In: groups. Out: groups, claimed and committed. What is measured is all that lies between the objects of a producer and those of a consumer.
It waits for the disk and for the server.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from benchmarks.buffer_peer import Atropos
from benchmarks.env_step_wire import cpu_s
from palestra.server.buffer.types import RunBuffer
from palestra.server.types import TrajectoryGroup
from palestra.server.wire.codec import decode_group, encode_group, join_blobs, split_blobs

OWNER, LEASE_S, ANSWER_S = "trainer", 600.0, 120.0


class Store(Protocol):
    """One place for groups."""

    def prepare(self, batch: int, tokens: int, size: int) -> None:
        """Told before each cell: groups at a time, tokens of a row, rows of a group."""

    def put(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Stores them; they are in its keeping when this returns."""

    def take(self, n: int) -> Sequence[TrajectoryGroup] | Sequence[dict[str, Any]]:
        """The next n, for good."""

    def cpu_s(self) -> tuple[float, float]:
        """Seconds of CPU so far: of this process, and of the server behind."""


class Wire:
    """One kept-alive connection that costs little, the same for our service and for the peer. It connects when it must."""

    def __init__(self, url: str, token: str | None = None) -> None:
        where = urlsplit(url)
        self._http = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_S)
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """The body of the answer; bodies are JSON where `headers` do not say otherwise.

        Raises:
            RuntimeError: its status is not 200.
        """
        self._http.request(method, path, body, {**self._headers, **headers})
        answer = self._http.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:500]!r}")
        return data

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The same in JSON; arrays may be numpy's."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return orjson.loads(self.ask(method, path, data))

    def close(self) -> None:
        """Hangs up."""
        self._http.close()


class InProcess:
    """A buffer of this process; with `pid`, that of a database behind it."""

    def __init__(self, buffer: RunBuffer, pid: int | None = None) -> None:
        self.buffer, self._pid = buffer, pid

    def prepare(self, batch: int, tokens: int, size: int) -> None:
        """Nothing."""

    def put(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Durably.

        Raises:
            RuntimeError: some were there already.
        """
        if (count := self.buffer.put(groups)) != len(groups):
            raise RuntimeError(f"{count} of {len(groups)} groups were new")

    def take(self, n: int) -> list[TrajectoryGroup]:
        """Claimed, and committed as a trainer would at the end of its step."""
        groups = self.buffer.claim(n, OWNER, LEASE_S)
        self.buffer.commit(0, "benchmark", [group.group_id for group in groups], OWNER)
        return groups

    def cpu_s(self) -> tuple[float, float]:
        """This process's, and the database's."""
        return time.process_time(), 0.0 if self._pid is None else cpu_s(self._pid)


class OverHttp:
    """The rollout service."""

    def __init__(self, wire: Wire, pid: int) -> None:
        self._wire, self._pid = wire, pid

    def prepare(self, batch: int, tokens: int, size: int) -> None:
        """Nothing."""

    def put(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Durably, each row compared with the record of its session.

        Raises:
            RuntimeError: the service did not take all.
        """
        body = join_blobs([encode_group(group) for group in groups])
        said = orjson.loads(self._wire.ask("POST", "/admin/put", body, {"content-type": "application/octet-stream"}))
        if said["count"] != len(groups):
            raise RuntimeError(f"{said['count']} of {len(groups)} groups were new")

    def take(self, n: int) -> list[TrajectoryGroup]:
        """Claimed, and committed as a trainer would at the end of its step."""
        claim = {"n": n, "owner": OWNER, "ttl_s": LEASE_S, "wait_s": 0.0}
        raw = self._wire.ask("POST", "/admin/claim", orjson.dumps(claim))
        groups = [decode_group(blob) for blob in split_blobs(raw)]
        names = [group.group_id for group in groups]
        self._wire.json(
            "POST", "/admin/commit", {"step": 0, "checkpoint_id": "benchmark", "group_ids": names, "owner": OWNER}
        )
        return groups

    def cpu_s(self) -> tuple[float, float]:
        """This process's, and the service's."""
        return time.process_time(), cpu_s(self._pid)


class Peer:
    """atroposlib's API server."""

    def __init__(self, wire: Wire, pid: int, *, plain: bool) -> None:
        self._wire, self._client, self._pid = wire, Atropos(wire, plain=plain), pid

    def prepare(self, batch: int, tokens: int, size: int) -> None:
        """Tells it how large batches are to be, over a new connection: it hangs up on idle ones."""
        self._wire.close()
        self._client.prepare(batch, tokens, size)

    def put(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Into its memory."""
        self._client.put(groups)

    def take(self, n: int) -> list[dict[str, Any]]:
        """Its next batch."""
        return self._client.take()

    def cpu_s(self) -> tuple[float, float]:
        """This process's, and the server's."""
        return time.process_time(), cpu_s(self._pid)
