"""Boxes on other machines: the `remote` backend, a client of one or more `palestra sandbox serve`.

In: URLs and a token. Out: boxes that are used like local ones, each on the host that had most room. A request that broke is sent again
under its own key, so that code never runs twice; a host that is gone costs the boxes that it had. Waits for the hosts, never without a
deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from palestra.sandbox.box import AgentBox
from palestra.sandbox.hosts import HostUnreachableError, SandboxHost, open_session
from palestra.sandbox.inside.frames import pack
from palestra.sandbox.remotechannel import HttpChannel
from palestra.sandbox.types import (
    BackendName,
    BoxSpec,
    Enforced,
    SandboxBusyError,
    SandboxUnavailableError,
)
from palestra.sandbox.wire import spec_to_message, weakest

CREATE_S = 60.0
"""Longest wait for a box, seconds."""
QUEUE_S = 10.0
"""Longest wait in one host's queue before the others are asked again."""
DELAYS_S = (0.05, 2.0)
"""First and longest pause after all hosts refused."""
BEATS = 4
"""How often within a lease a host hears of its boxes."""

logger = logging.getLogger(__name__)


class Remote:
    """`types.Backend` whose boxes are on `urls`."""

    name: BackendName = "remote"

    def __init__(
        self, urls: Sequence[str], *, token: str | None = None, create_s: float = CREATE_S, lost_s: float = 15.0
    ) -> None:
        """`create_s`: longest wait of `create`; `lost_s`: how long a host may be away before a box on it counts as lost; both in seconds.

        Raises:
            ValueError: no URLs, or one that is none.
        """
        if not urls:
            raise ValueError("the remote backend needs the URL of at least one sandbox host")
        self._hosts = [SandboxHost(url, token) for url in dict.fromkeys(urls)]
        self._create_s, self._lost_s = create_s, lost_s
        self._session: Any = None
        self._promised: Enforced | None = None
        self._boxes: dict[AgentBox, HttpChannel] = {}
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Asks every host what it is like. One that is away is asked again when a box is wanted.

        Raises:
            SandboxUnavailableError: none can be used, or one refused us.
        """
        self._session = open_session()
        away = []
        for host in self._hosts:
            host.use(self._session)
        try:
            for said in await asyncio.gather(*(host.probe() for host in self._hosts), return_exceptions=True):
                if isinstance(said, HostUnreachableError):
                    away.append(str(said))
                elif isinstance(said, BaseException):
                    raise said
            if len(away) == len(self._hosts):
                raise SandboxUnavailableError(
                    f"no sandbox host answers: {'; '.join(away)}; start one there with `palestra sandbox serve`"
                )
        except BaseException:
            await self.close()
            raise
        self._promised = weakest({host.url: host.facts.enforced for host in self._hosts if host.facts is not None})
        for said_away in away:
            logger.warning("%s; it is used once it answers, if it holds what the others do", said_away)
        self._beat = asyncio.create_task(self._keep_alive(), name="sandbox-heartbeat")

    def enforced(self) -> Enforced:
        """What the weakest of the hosts holds; one that comes later and holds less is not used."""
        return self._promised or weakest({})

    async def create(self, spec: BoxSpec) -> AgentBox:
        """See `types.Backend`. Asks the host with most room first; while all are full, waits in a queue or a little, up to `create_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._create_s
        asked = _Asking(pack(spec_to_message(spec)), {host: uuid.uuid4().hex for host in self._hosts})
        for turn in itertools.count():
            hosts = sorted(self._hosts, key=lambda host: -host.room)
            said: dict[str, str] = {}
            refused = 0
            for place, host in enumerate(hosts):
                # Nobody stands in a queue while another host may have room at once.
                queues = place == 0 and (turn > 0 or len(hosts) == 1)
                wait = min(QUEUE_S, max(until - loop.time(), 0.0)) if queues else 0.0
                try:
                    return await self._create_on(host, spec, asked, wait)
                except SandboxUnavailableError as error:
                    said[host.url], refused = str(error), refused + 1
                except (HostUnreachableError, SandboxBusyError) as error:
                    said[host.url] = str(error)
            told = "; ".join(said.values())
            if refused == len(hosts):
                raise SandboxUnavailableError(told)
            pause = min(DELAYS_S[0] * 2 ** min(turn, 10), DELAYS_S[1])
            if loop.time() + pause >= until:
                raise SandboxBusyError(f"no sandbox host gave a box within {self._create_s:g} s: {told}")
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _create_on(self, host: SandboxHost, spec: BoxSpec, asked: _Asking, wait: float) -> AgentBox:
        if host.facts is None:
            await host.probe(self._promised)
        name, instance = await host.create(asked.spec, asked.keys[host], wait)
        if host.facts is None or instance != host.facts.instance:
            host.facts = None
            try:
                await host.probe(self._promised)
            except BaseException:
                await host.destroy(name)
                raise
        channel = HttpChannel(host, name, self._lost_s)

        async def destroy() -> None:
            self._boxes.pop(box, None)
            await host.destroy(name)

        box = AgentBox(f"{host.url}/boxes/{name}", spec, channel, self, destroy)
        self._boxes[box] = channel
        return box

    async def _keep_alive(self) -> None:
        """Tells the hosts of their boxes for as long as this backend is open; whoever waits for a box that is gone is told."""
        while True:
            leases = [host.facts.lease_s for host in self._hosts if host.facts is not None]
            await asyncio.sleep(min(leases, default=CREATE_S) / BEATS)
            wanted: dict[SandboxHost, dict[str, HttpChannel]] = {}
            for channel in self._boxes.values():
                wanted.setdefault(channel.host, {})[channel.name] = channel
            said = await asyncio.gather(*(host.gone(list(of)) for host, of in wanted.items()), return_exceptions=True)
            for (host, of), gone in zip(wanted.items(), said, strict=True):
                if isinstance(gone, HostUnreachableError):
                    logger.warning("%d boxes may be lost: %s", len(of), gone)
                elif isinstance(gone, BaseException):
                    raise gone
                else:
                    for name in gone:
                        of[name].lose(f"{host.url} has no box {name} any more")

    async def reap(self) -> int:
        """0: what a client leaves behind ends with its lease, on the hosts."""
        return 0

    async def close(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
            self._beat = None
        await asyncio.gather(*(box.close() for box in list(self._boxes)))
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # aiohttp's connections close in the loop's next round
            self._session = None


class _Asking:
    """A box that is asked for: its specification as a frame, and a key per host, so that asking again finds what was made meanwhile."""

    def __init__(self, spec: bytes, keys: dict[SandboxHost, str]) -> None:
        self.spec, self.keys = spec, keys
