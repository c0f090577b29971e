"""One sandbox host as its clients see it: calls over HTTP, what it promised when it was asked, how much room it has.

In: requests as bytes, with a deadline each. Out: answers, or an error that says whether the host was reached. No call is repeated here.
Waits for the host.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp

from palestra.sandbox.inside.frames import HEAD, MAX_FRAME, FrameError, pack
from palestra.sandbox.types import Enforced, SandboxBusyError, SandboxError, SandboxUnavailableError
from palestra.sandbox.wire import CONTENT_TYPE, KEY, ROOM, TIMEOUT, WAIT, enforced_from_json, falls_short, read_frame

CONNECT_S = 5.0
IDLE_S = 30.0
"""How long an unused connection is kept: less than a host does, or a request could be sent into one that is being closed."""
START_S = 30.0
"""How much longer than asked for a host may take to give a box: it may have to make one."""
CONTROL_S = 15.0
"""Longest wait for an answer to what needs no box."""
GATEWAY = frozenset((502, 504))
"""Statuses of a proxy that did not reach the host."""

logger = logging.getLogger(__name__)


class HostUnreachableError(SandboxError):
    """A host could not be reached, or the connection broke before its answer was whole: it may have got the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def reason(self) -> tuple[str, str]:
        """Code and text of an error."""
        try:
            said = json.loads(self.body)["error"]
            return str(said["code"]), str(said["message"])[:500]
        except (ValueError, KeyError, TypeError):
            return "", f"status {self.status}"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says of itself."""

    instance: str
    """Another one after each start of the host."""
    backend: str
    enforced: Enforced
    lease_s: float
    """A box that it does not hear of for so long is destroyed."""


def open_session() -> aiohttp.ClientSession:
    """What carries the calls to all hosts."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)


class SandboxHost:
    """A host of a `Remote`."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises:
        ValueError: no URL of a host.
        """
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")) or len(self.url.split("://")[1]) == 0:
            raise ValueError(f"sandbox host {url!r}: give a URL such as http://10.0.0.7:8070")
        self.facts: HostFacts | None = None
        """None until it was reached."""
        self.room = 1
        """How many more boxes it could give when it last said so."""
        self._headers = {"Content-Type": CONTENT_TYPE, **({"Authorization": f"Bearer {token}"} if token else {})}
        self._session: aiohttp.ClientSession | None = None

    def use(self, session: aiohttp.ClientSession) -> None:
        """Calls go through this session, which is somebody else's to close."""
        self._session = session

    async def call(
        self, method: str, path: str, body: bytes = b"", *, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request, at most `timeout` seconds.

        Raises:
            HostUnreachableError: no whole answer came.
        """
        if self._session is None:
            raise HostUnreachableError(f"{self.url}: the backend was not started, or is closed")
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_S, timeout))
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers={**self._headers, **(headers or {})},
                timeout=limits,
                allow_redirects=False,
            ) as response:
                found = await _bounded(response)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            said = str(error) or type(error).__name__
            raise HostUnreachableError(f"{self.url} cannot be reached: {said}") from None
        if response.status in GATEWAY:
            raise HostUnreachableError(f"{self.url} cannot be reached: a proxy answered {response.status}")
        if (room := response.headers.get(ROOM, "")).lstrip("-").isdecimal():
            self.room = int(room)
        return Answer(response.status, response.headers, found)

    async def probe(self, promised: Enforced | None = None) -> HostFacts:
        """Asks what it is like, and whether it takes our token.

        Raises:
            HostUnreachableError: it does not answer.
            SandboxUnavailableError: it is no sandbox host, does not know the token, or holds less than `promised`.
        """
        health = await self.call("GET", "/health", timeout=CONTROL_S)
        alive = await self.call("POST", "/alive", pack({"boxes": []}), timeout=CONTROL_S)
        if 401 in (health.status, alive.status):
            raise SandboxUnavailableError(f"{self.url} wants another token: give the one of its --token-file")
        try:
            said = json.loads(health.body)
            facts = HostFacts(
                str(said["host"]), str(said["backend"]), enforced_from_json(said["enforced"]), float(said["lease_s"])
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SandboxUnavailableError(f"{self.url} is no sandbox host (GET /health: {health.status})") from None
        if promised is not None and (less := falls_short(facts.enforced, promised)):
            raise SandboxUnavailableError(
                f"{self.url} ({facts.backend}) holds less than the hosts that were there at the start: {', '.join(less)}"
            )
        self.facts = facts
        return facts

    async def create(self, spec: bytes, key: str, wait: float) -> tuple[str, str]:
        """Asks for a box: its name, and the instance of the host that has it.

        Raises:
            HostUnreachableError: no answer; the same key finds the box that was made meanwhile.
            SandboxBusyError: no room now.
            SandboxUnavailableError: this spec cannot be had here.
        """
        headers = {KEY: key, WAIT: f"{wait:.3f}"}
        answer = await self.call("POST", "/boxes", spec, timeout=wait + START_S + CONTROL_S, headers=headers)
        if answer.status != 200:
            self._refuse(answer)
        try:
            made = read_frame(answer.body)
            return str(made["box"]), str(made["host"])
        except (FrameError, KeyError) as error:
            raise SandboxUnavailableError(f"{self.url} is no sandbox host: {error}") from None

    def _refuse(self, answer: Answer) -> NoReturn:
        _, said = answer.reason
        if answer.status in (429, 503):
            raise SandboxBusyError(f"{self.url}: {said}")
        if answer.status >= 500:
            raise HostUnreachableError(f"{self.url} failed: {said}")
        raise SandboxUnavailableError(f"{self.url}: {said}")

    async def ask(self, box: str, request: bytes, key: int, timeout: float, patience: float) -> Answer:
        """Sends an agent's request, or nothing to ask again for the answer to the same key. Waits `patience` seconds for the host.

        Raises:
            HostUnreachableError: no answer; the same key never runs code twice.
        """
        headers = {KEY: str(key), TIMEOUT: f"{timeout:.3f}"}
        return await self.call("POST", f"/boxes/{box}", request, timeout=patience, headers=headers)

    async def destroy(self, box: str) -> None:
        """Ends a box; one that the host cannot be told of ends with its lease."""
        try:
            answer = await self.call("DELETE", f"/boxes/{box}", timeout=START_S)
        except HostUnreachableError as error:
            logger.warning("box %s ends with its lease only: %s", box, error)
            return
        if answer.status not in (204, 404):
            logger.warning("box %s of %s: %s", box, self.url, answer.reason[1])

    async def gone(self, boxes: list[str]) -> list[str]:
        """Says that these boxes are wanted; which of them the host does not have.

        Raises:
            HostUnreachableError: no answer.
        """
        answer = await self.call("POST", "/alive", pack({"boxes": list(boxes)}), timeout=CONTROL_S)
        if answer.status != 200:
            raise HostUnreachableError(f"{self.url}: {answer.reason[1]}")
        try:
            found: Any = read_frame(answer.body)["gone"]
            return [str(name) for name in found]
        except (FrameError, KeyError, TypeError) as error:
            raise HostUnreachableError(f"{self.url} answered nonsense: {error}") from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """A body, no longer than a frame can be.

    Raises:
        ClientPayloadError: it is longer.
    """
    most = HEAD.size + MAX_FRAME
    if (response.content_length or 0) <= most:
        found = bytearray()
        async for piece in response.content.iter_any():
            found += piece
            if len(found) > most:
                break
        else:
            return bytes(found)
    raise aiohttp.ClientPayloadError(f"an answer of more than {most} bytes")
