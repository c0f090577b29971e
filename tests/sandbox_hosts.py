"""Sandbox hosts for tests: `palestra sandbox serve` as a process, and a way to it that can be broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

START_S = 60.0
UNSAFE = ("--sandbox.backend=unsafe_subprocess", "--sandbox.i_understand=true")


class HostProcess:
    """A host on a free port of loopback. Its boxes confine nothing: harmless code only."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "palestra.cli.main", "sandbox", "serve", "--listen", "127.0.0.1:0", *UNSAFE]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        self.url = self._said("sandbox host")

    def _said(self, what: str) -> str:
        assert self.process.stdout is not None
        until = time.monotonic() + START_S
        while select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0))[0]:
            if not (line := self.process.stdout.readline()):
                break
            if line.startswith(what):
                return line.split()[-1]
        raise AssertionError(f"the sandbox host did not start: exit status {self.process.poll()}")

    def get(self, path: str, token: str | None = None) -> str:
        """What it answers to a GET."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=10) as answer:
            return str(answer.read().decode())

    def boxes(self) -> list[dict[str, Any]]:
        """Its boxes that clients have."""
        found: list[dict[str, Any]] = json.loads(self.get("/boxes"))["boxes"]
        return found

    def down(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it by this signal; its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@contextlib.contextmanager
def host_process(*options: str) -> Iterator[HostProcess]:
    """A host for as long as the block lasts."""
    host = HostProcess(*options)
    try:
        yield host
    finally:
        host.down()


class Wire:
    """A relay to a host that loses what it is told to."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = ""
        self.lose_answers = 0
        """Of so many coming answers the connection breaks instead."""
        self.lose_requests = 0
        """Of so many coming requests the connection breaks before the host gets them."""
        self.lost = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._pipe(reader, back, "lose_requests")),
            asyncio.create_task(self._pipe(there, writer, "lose_answers")),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, back):
                end.transport.abort()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, loses: str) -> None:
        while data := await source.read(1 << 16):
            if left := getattr(self, loses):
                setattr(self, loses, left - 1)
                self.lost += 1
                return
            sink.write(data)
            await sink.drain()


@contextlib.asynccontextmanager
async def breakable(url: str) -> AsyncIterator[Wire]:
    """A relay to the host at `url`."""
    wire = Wire(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
