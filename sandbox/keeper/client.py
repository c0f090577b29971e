"""The service's side of its keeper: starts it, asks it, and hears from it.

In: requests, with a descriptor where a box starts. Out: answers as futures, events to whoever asked for them. Waits for the keeper.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import socket
import subprocess
import sys
from typing import Any

from palestra.sandbox.inside.frames import FrameError, pack, unpack
from palestra.sandbox.types import SandboxError, SandboxUnavailableError

MESSAGE_BYTES = 1 << 18
START_S = 60.0
"""Most time for a keeper to come up: on a busy machine its imports alone take seconds."""
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")


class KeeperLostError(SandboxError):
    """The keeper is gone, and all its boxes with it."""


class KeeperClient:
    """A running keeper. Belongs to the event loop that started it."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process, self.hello = process, dict[str, Any]()
        self.lost = asyncio.get_running_loop().create_future()
        """Done when the keeper is gone."""
        self.kills: collections.Counter[int] = collections.Counter()
        """Processes that its watchdog killed, by box."""
        self.said: dict[int, str] = {}
        """Last words of boxes that ended by themselves."""
        self._sock = sock
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unsent: collections.deque[tuple[bytes, list[socket.socket]]] = collections.deque()
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(sock, self.look)

    @classmethod
    async def start(cls) -> KeeperClient:
        """A new keeper, once it has looked at the machine.

        Raises:
            SandboxUnavailableError: it does not come up.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        ours.setblocking(False)
        process = _run(theirs)
        theirs.close()
        client = cls(process, ours)
        try:
            async with asyncio.timeout(START_S):
                await client._greeted
        except (TimeoutError, KeeperLostError) as error:
            process.kill()
            await client.close()
            raise SandboxUnavailableError(
                f"the sandbox's keeper did not come up ({error or 'no word from it'}); its errors are above"
            ) from None
        return client

    def ask(self, request: dict[str, Any], give: socket.socket | None = None) -> asyncio.Future[dict[str, Any]]:
        """Sends a request at once; its answer comes as a future. `give` is a socket for the keeper, closed here.

        The future raises:
            KeeperLostError: it is gone.
            SandboxError: it cannot do that; the text says why.
        """
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.lost.done():
            if give is not None:
                give.close()
            future.set_exception(KeeperLostError("the sandbox's keeper is gone"))
            return future
        number = next(self._numbers)
        self._waiting[number] = future
        self._unsent.append((pack({**request, "id": number})[4:], [give] if give is not None else []))
        self._flush()
        return future

    def look(self) -> None:
        """Takes what the keeper has said until now."""
        while not self.lost.done():
            try:
                data = self._sock.recv(MESSAGE_BYTES)
                message = unpack(data) if data else None
            except BlockingIOError:
                return
            except (OSError, FrameError):
                message = None
            if message is None:
                self._fail()
            else:
                self._hear(message)

    def forget(self, box: int) -> None:
        """This box is gone for good."""
        self.kills.pop(box, None)
        self.said.pop(box, None)

    def _hear(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event == "oom":
            self.kills[message["box"]] += 1
        elif event == "ended":
            self.said[message["box"]] = message["said"]
        elif event == "hello":
            self.hello = message
            if not self._greeted.done():
                self._greeted.set_result(None)
        else:
            future = self._waiting.pop(message["id"], None)
            if future is None or future.done():
                return
            if "error" in message:
                future.set_exception(SandboxError(message["error"]))
            else:
                future.set_result(message)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                data, given = self._unsent[0]
                socket.send_fds(self._sock, [data], [sock.fileno() for sock in given])
                self._unsent.popleft()
                for sock in given:
                    sock.close()
        except BlockingIOError:
            loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._fail()
            return
        loop.remove_writer(self._sock)

    def _fail(self) -> None:
        """It is gone."""
        if self.lost.done():
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()
        self.lost.set_result(None)
        for _, given in self._unsent:
            for sock in given:
                sock.close()
        self._unsent.clear()
        waiting = [*self._waiting.values()]
        self._waiting.clear()
        if not self._greeted.done():
            waiting.append(self._greeted)  # type: ignore[arg-type]
        for future in waiting:
            if not future.done():
                future.set_exception(KeeperLostError("the sandbox's keeper is gone"))

    async def close(self) -> None:
        """Lets it go: it ends its boxes, clears up and ends. Returns when it has. Safe to call twice."""
        self._fail()
        if self._greeted.done() and not self._greeted.cancelled():
            self._greeted.exception()  # nobody waits for it any more
        if self.process.returncode is None:
            await self._ended()
            self.process.wait()

    async def _ended(self) -> None:
        fd = os.pidfd_open(self.process.pid)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, _set, over)
        try:
            await over
        finally:
            loop.remove_reader(fd)
            os.close(fd)


def _run(sock: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "palestra.sandbox.keeper", str(sock.fileno()), str(os.getpid())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        start_new_session=True,  # Ctrl-C in the service's terminal is not for it
    )


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
