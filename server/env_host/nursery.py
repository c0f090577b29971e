"""The host's side of the zygote: starts it, has it fork environments, and hears of their ends.

In: sockets of clients. Out: a future per session, done when its process has ended. A zygote that dies takes its sessions with it, and
another one is started. Waits for the zygote to come up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from typing import Any

import orjson

from palestra.envs.types import EnvError
from palestra.server.env_host import slots
from palestra.server.env_host.types import CAPACITY_REACHED, About, EnvHostSettings, EnvRefusal, Served
from palestra.server.env_host.zygote import MESSAGE_BYTES

logger = logging.getLogger(__name__)

WARM_S = 300.0
"""Longest time for an environment's module and tasks to be built, seconds."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""One thread each: there is a process per environment, and a fork takes no other thread along."""


class Nursery:
    """A running zygote. Belongs to the event loop that started it."""

    def __init__(self, served: Served, settings: EnvHostSettings) -> None:
        self._served, self._settings = served, settings
        self._fd = slots.make(settings.max_envs)
        self._memory = slots.attach(self._fd)
        self._about: About | None = None
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._ends: dict[int, asyncio.Future[tuple[int | None, str]]] = {}
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def about(self) -> About:
        """What is served."""
        assert self._about is not None, "known once started"
        return self._about

    def slot(self, number: int) -> slots.Slot:
        """One session's slot."""
        return slots.Slot(self._memory, number)

    async def start(self) -> None:
        """Starts the zygote and waits until it has made an environment.

        Raises:
            EnvError: the environment cannot be served; the text is the zygote's.
        """
        ready = await self._launch(cold=self._about is not None)
        if ready["threads"] > 1:
            # Locks that those threads hold would stay locked in every fork: only what is imported can be shared.
            logger.info(
                "%s starts threads when it is made; its processes start from the imports alone", self._served.env_id
            )
            await self._stop()
            ready = {**await self._launch(cold=True), "about": ready["about"]}
        about = ready["about"]
        if about is not None:
            version = _version()
            self._about = About(about["name"], about["description"], version, about["tasks"], tuple(about["tools"]))

    async def _launch(self, *, cold: bool) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        ours.setblocking(False)
        told = {
            "env_id": self._served.env_id, "args": dict(self._served.args), "path": sys.path,
            "memory_bytes": self._settings.memory_bytes, "cold": cold,
        }  # fmt: skip
        with theirs:
            self._process = _run(theirs.fileno(), self._fd)
        ours.send(orjson.dumps(told))
        loop = asyncio.get_running_loop()
        self._sock, self._ready = ours, loop.create_future()
        loop.add_reader(ours, self._look)
        try:
            async with asyncio.timeout(WARM_S):
                return await self._ready
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise EnvError(f"{self._served.env_id} was not made within {WARM_S:g} s") from None
            raise

    def _look(self) -> None:
        """Takes what the zygote has said."""
        while self._sock is not None:
            try:
                data = self._sock.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._take(orjson.loads(data))

    def _take(self, message: dict[str, Any]) -> None:
        if message["event"] == "ended":
            end = self._ends.pop(message["session"], None)
            if end is not None and not end.done():
                end.set_result((message["status"], message["said"]))
        elif self._ready is not None and not self._ready.done():
            if message["event"] == "ready":
                self._ready.set_result(message)
            else:
                self._ready.set_exception(EnvError(message["error"]))

    def _lost(self) -> None:
        """The zygote is gone, and all its sessions with it."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EnvError("the process that makes environments ended; its errors are above"))
        for end in self._ends.values():
            if not end.done():
                end.set_result((None, "the process that makes environments ended"))
        self._ends.clear()

    async def spawn(self, session: int, slot: int, client: socket.socket, *, websocket: bool) -> asyncio.Future[Any]:
        """Has an environment made whose process owns `client`; it stays open here too. The future gives exit status and last words.

        Raises:
            EnvRefusal: there is no zygote, and another one cannot be started.
        """
        if self._sock is None and not self._closed:
            await self._again()
        if self._sock is None:
            raise EnvRefusal("no environments are made here any more", 503, CAPACITY_REACHED, 5)
        end: asyncio.Future[tuple[int | None, str]] = asyncio.get_running_loop().create_future()
        self._ends[session] = end
        message = orjson.dumps({"op": "spawn", "session": session, "slot": slot, "websocket": websocket})
        try:
            socket.send_fds(self._sock, [message], [client.fileno()])
        except OSError as error:
            del self._ends[session]
            raise EnvRefusal(f"no environment could be made: {error.strerror}", 503, CAPACITY_REACHED, 1) from None
        return end

    async def _again(self) -> None:
        if self._starting is None or self._starting.done():
            logger.warning("the process that makes environments is gone; another one is started")
            self._starting = asyncio.create_task(self.start(), name="nursery")
        try:
            await asyncio.shield(self._starting)
        except EnvError as error:
            raise EnvRefusal(str(error), 503, CAPACITY_REACHED, 5) from None

    def kill(self, session: int) -> None:
        """Ends a session's process at once."""
        if self._sock is not None and session in self._ends:
            with contextlib.suppress(OSError):  # the zygote is gone, and so are its children
                self._sock.send(orjson.dumps({"op": "kill", "session": session}))

    async def close(self) -> None:
        """Ends the zygote and all that it started. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._stop()
        os.close(self._fd)

    async def _stop(self) -> None:
        self._lost()
        process = self._process
        if process is None:
            return
        # It ends its children first. One that is still building its environment does not listen.
        loop = asyncio.get_running_loop()
        fd = os.pidfd_open(process.pid)
        over = loop.create_future()
        loop.add_reader(fd, lambda: None if over.done() else over.set_result(None))
        try:
            async with asyncio.timeout(5.0):
                await over
        except TimeoutError:
            process.kill()
            await over
        finally:
            loop.remove_reader(fd)
            os.close(fd)
            process.wait()
            self._process = None


def _run(sock: int, memory: int) -> subprocess.Popen[bytes]:
    # From the main thread, which lives as long as the process: the kernel's word of a parent's death follows the thread.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "palestra.server.env_host.zygote", str(sock), str(memory)],
        pass_fds=[sock, memory],
        stdin=subprocess.DEVNULL,
        env={**dict.fromkeys(THREADS, "1"), **os.environ},
        start_new_session=True,  # Ctrl-C in the host's terminal is not for it
    )


def _version() -> str:
    from importlib.metadata import version

    return version("palestra")
