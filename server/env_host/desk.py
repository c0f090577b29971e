"""The host's sessions: which are open, what ends them, and what their clients are told.

In: connections of clients, or requests of the plain HTTP routes. Out: a process per session, answers, errors with a reason. A session is
ended when its client goes, when it is idle, when a step takes too long or when its process dies; none of that touches another one.

Waits for the environments' processes; each wait ends with the process, and the sweep ends those that take too long.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import secrets
import signal
import socket
from typing import Any

import orjson

from palestra.server.env_host import slots, wire
from palestra.server.env_host.channels import LENGTH
from palestra.server.env_host.child import NO_MEMORY, NOT_MADE, OVER
from palestra.server.env_host.nursery import Nursery
from palestra.server.env_host.types import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    SESSION_ERROR,
    EnvHostSettings,
    EnvRefusal,
    Phase,
)
from palestra.server.env_host.websocket import FAULT, GOING_AWAY, TEXT, closing, frame

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long an environment may take to close before its process is killed, seconds."""
BUSY_AGAIN_S = 5
"""When a client that found no room may ask again, seconds."""
STATUSES = {"closed": 404, "idle": 404, "deadline": 504, "start": 504}
"""HTTP status for a client that asks a session which has ended, by why it has; otherwise 500."""


class Open:
    """One session."""

    def __init__(self, number: int, slot: slots.Slot, sock: socket.socket, websocket: bool) -> None:
        self.number, self.slot, self.sock, self.websocket = number, slot, sock, websocket
        """`sock` is our descriptor of the client's own connection, or our end of the pipe."""
        self.why = ""
        """Why the host ends it."""
        self.ending_at: float | None = None
        self.killed = False
        self.turn = asyncio.Lock()
        """Held by the HTTP request that the process works on."""
        self.over: asyncio.Future[EnvRefusal] = asyncio.get_running_loop().create_future()
        """Done when its process has ended: what a client that still asks is told."""


class EnvDesk:
    """All sessions of a host. Belongs to one event loop."""

    def __init__(self, nursery: Nursery, settings: EnvHostSettings) -> None:
        self.nursery, self.settings = nursery, settings
        self.counts: collections.Counter[str] = collections.Counter()
        """Sessions that ended, by why; `started` and `refused`; `steps` of those that ended."""
        self._free = list(range(settings.max_envs - 1, -1, -1))
        self._open: dict[int, Open] = {}
        self._names: dict[str, Open] = {}
        self._numbers = 0
        self._watches: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Begins to sweep; the nursery has been started."""
        self._sweeper = asyncio.create_task(self._sweep(), name="env-sweep")

    @property
    def open(self) -> int:
        """Sessions at the moment."""
        return len(self._open)

    @property
    def steps(self) -> int:
        """Steps since the start."""
        return self.counts["steps"] + sum(one.slot.look()[2] for one in self._open.values())

    async def adopt(self, sock: socket.socket, *, websocket: bool) -> Open:
        """A new session for `sock`: a client's connection after its handshake, or our end of a pipe, see `open_pipe`. Closed at its end.

        Raises:
            EnvRefusal: there is no room. `sock` is the caller's still.
        """
        return await self._begin(sock, sock, websocket)

    async def open_pipe(self) -> str:
        """A new session for the HTTP routes; its name.

        Raises:
            EnvRefusal: there is no room.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        with theirs:
            try:
                one = await self._begin(ours, theirs, websocket=False)
            except BaseException:
                ours.close()
                raise
        name = secrets.token_urlsafe(16)
        self._names[name] = one
        one.over.add_done_callback(lambda _: self._names.pop(name, None))
        return name

    async def _begin(self, ours: socket.socket, theirs: socket.socket, websocket: bool) -> Open:
        if self._closing or not self._free:
            self.counts["refused"] += 1
            said = (
                f"all {self.settings.max_envs} environments are in use" if not self._closing else "the host is closing"
            )
            raise EnvRefusal(said, 503, CAPACITY_REACHED, BUSY_AGAIN_S)
        self._numbers += 1
        slot = self.nursery.slot(self._free.pop())
        slot.mark(Phase.STARTING)
        one = Open(self._numbers, slot, ours, websocket)
        try:
            ended = await self.nursery.spawn(one.number, slot.number, theirs, websocket=websocket)
        except BaseException:
            self._free.append(slot.number)
            raise
        self._open[one.number] = one
        self.counts["started"] += 1
        watch = asyncio.create_task(self._watch(one, ended), name=f"env-{one.number}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return one

    async def ask(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message to a session of `open_pipe`; its answer's data.

        Raises:
            EnvRefusal: there is no such session, the environment refuses or fails, or its process is gone.
        """
        one = self._find(name)
        async with one.turn:
            try:
                answer = await self._exchange(one, orjson.dumps(message))
            except OSError:
                answer = b""
        if not answer:
            gone = await one.over
            raise EnvRefusal(str(gone), gone.status, gone.code)
        said = orjson.loads(answer)
        if said["type"] == "error":
            data = said["data"]
            raise EnvRefusal(data["message"], data["status"], data["code"])
        return dict(said["data"])

    async def _exchange(self, one: Open, message: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one.sock, LENGTH.pack(len(message)) + message)
        head = await _exactly(one.sock, LENGTH.size)
        return await _exactly(one.sock, LENGTH.unpack(head)[0]) if head else b""

    def _find(self, name: str) -> Open:
        one = self._names.get(name)
        if one is None:
            raise EnvRefusal(
                f"there is no session {name[:100]!r} here (any more): reset without one", 404, SESSION_ERROR
            )
        return one

    async def close_session(self, name: str) -> None:
        """Ends a session of `open_pipe`; returns when its process is gone.

        Raises:
            EnvRefusal: there is no such session.
        """
        one = self._find(name)
        self._end(one, "closed")
        await one.over

    def _end(self, one: Open, why: str) -> None:
        """Has a session end: at once where it does not listen, after closing its environment where it does."""
        if one.ending_at is not None:
            return
        one.why, one.ending_at = why, asyncio.get_running_loop().time()
        if one.slot.look()[1] is Phase.WAITING:
            self._hang_up(one)
        else:
            self._kill(one)

    def _hang_up(self, one: Open) -> None:
        # A process that waits for its client sees the end of its stream, and closes its environment. It is not in the middle of an answer.
        if one.websocket:
            _send(one.sock, closing(GOING_AWAY, self._cause(one, None, "")[1]))
        try:
            one.sock.shutdown(socket.SHUT_RD if one.websocket else socket.SHUT_RDWR)
        except OSError:  # the client has gone, which comes to the same
            logger.debug("session %d: its client was gone", one.number)

    def _kill(self, one: Open) -> None:
        if not one.killed:
            one.killed = True
            self.nursery.kill(one.number)

    async def _watch(self, one: Open, ended: asyncio.Future[tuple[int | None, str]]) -> None:
        """Waits for the end of a session's process, and says goodbye."""
        status, said = await ended
        _, phase, steps = one.slot.look()
        why, text = self._cause(one, status, said)
        self.counts[why] += 1
        self.counts["steps"] += steps
        del self._open[one.number]
        self._free.append(one.slot.number)
        refusal = EnvRefusal(text, STATUSES.get(why, 500), EXECUTION_ERROR)
        if why not in ("closed", "idle"):
            logger.warning("session %d: %s", one.number, text)
        if one.websocket and status not in (OVER, NOT_MADE):
            _say(one.sock, refusal, mid_answer=phase is Phase.SENDING)
        one.over.set_result(refusal)
        one.sock.close()

    def _cause(self, one: Open, status: int | None, said: str) -> tuple[str, str]:
        """In a word, for the figures; in a sentence, for the client."""
        if one.why == "deadline":
            return (
                "deadline",
                f"the environment gave no answer within {self.settings.step_s:g} s; its process was ended",
            )
        if one.why == "start":
            return "start", f"the environment was not made within {self.settings.start_s:g} s; its process was ended"
        if one.why:
            return (
                one.why,
                f"nothing was asked for {self.settings.idle_s:g} s" if one.why == "idle" else "it was closed",
            )
        if status == OVER:
            return "closed", "its client closed it"
        if status == NOT_MADE:
            return "not_made", "the environment could not be made"
        if status == NO_MEMORY:
            limit = self.settings.memory_bytes >> 20
            return "memory", f"the environment wanted more than its {limit} MiB of memory; its process was ended"
        how = said or (f"signal {signal.Signals(-status).name}" if status and status < 0 else f"exit status {status}")
        return "crashed", f"the environment's process ended: {how}"

    async def _sweep(self) -> None:
        """For ever: ends what is idle, hangs, or does not end."""
        settings = self.settings
        pause = min(settings.idle_s, settings.step_s, settings.start_s, 2.0) / 4
        limits = {
            Phase.STARTING: (settings.start_s, "start"), Phase.WAITING: (settings.idle_s, "idle"),
            Phase.WORKING: (settings.step_s, "deadline"), Phase.SENDING: (settings.idle_s, "idle"),
        }  # fmt: skip
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause)
            for one in list(self._open.values()):
                for_s, phase, _ = one.slot.look()
                limit_s, why = limits[phase]
                if one.ending_at is not None and loop.time() - one.ending_at > GRACE_S:
                    self._kill(one)
                elif one.ending_at is None and for_s > limit_s:
                    self._end(one, why)

    async def close(self) -> None:
        """Ends all sessions and the nursery. Further ones are refused. Safe to call twice."""
        self._closing = True
        for one in list(self._open.values()):
            self._end(one, "closed")
        if watches := list(self._watches):
            await asyncio.wait(watches, timeout=GRACE_S)
        for one in list(self._open.values()):
            self._kill(one)
        await self.nursery.close()
        if watches := list(self._watches):
            await asyncio.wait(watches, timeout=GRACE_S)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes; nothing where the other side went first."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < count:
        data = await loop.sock_recv(sock, min(count - len(found), 1 << 18))
        if not data:
            return b""
        found += data
    return bytes(found)


def _say(sock: socket.socket, refusal: EnvRefusal, *, mid_answer: bool) -> None:
    """Tells the client of a process that can tell it nothing any more. In the middle of an answer there is nothing that it would read."""
    if not mid_answer:
        _send(sock, frame(TEXT, wire.write_json(wire.failed(refusal))) + closing(FAULT, str(refusal)))


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.send(data, socket.MSG_DONTWAIT)
    except OSError as error:  # it went before, or reads nothing
        logger.debug("a client was not told: %s", error)
