"""Everything that runs during the benchmark, and the folder that it lives in.

In: the commands of `buffer.py`. Out: a `Stage`: the service with the record of all rollouts that it will be given rows of, the peer, a
PostgreSQL server where its programs are there, each with a store that measures it. All of it ends with the stage, and its folder goes. It
waits for pip and for processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from benchmarks import buffer_peer
from benchmarks.buffer_groups import write_record
from benchmarks.buffer_stores import InProcess, OverHttp, Peer, Store, Wire
from benchmarks.gateway_procs import Process, ProcessDesk
from palestra.server.buffer.embedded import EmbeddedBuffer

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".bench"
TOKEN = "benchmark"
EMBEDDED, POSTGRES, HTTP = "embedded", "postgres", "http"
PEER, PLAIN = buffer_peer.NAME, f"{buffer_peer.NAME}, its own clients"


class Stage:
    """The benchmark's processes and stores. A context."""

    def __init__(self) -> None:
        self.stores: dict[str, Store] = {}
        self._stack = ExitStack()

    @staticmethod
    def install() -> None:
        """The peer, where it is missing."""
        HOME.mkdir(exist_ok=True)
        # Everything here is made by a command: nothing of it belongs under version control.
        (HOME / ".gitignore").write_text("*\n")
        buffer_peer.install(HOME / "peers")

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-", dir=HOME))
        self._stack.callback(shutil.rmtree, self.folder)
        self._desk = ProcessDesk(self.folder / "run")
        self._stack.callback(self._desk.end_all)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, record: Iterable[tuple[str, int, int]]) -> None:
        """Starts all. `record`: name, tokens and kind of each group that will be put over HTTP.

        Raises:
            RuntimeError: a process did not become ready.
        """
        embedded = EmbeddedBuffer(self.folder / "embedded")
        self._stack.callback(embedded.close)
        self.stores[EMBEDDED] = InProcess(embedded)
        try:
            self.stores[POSTGRES] = self._stack.enter_context(_postgres(self.folder / "postgres"))
        except pytest.fail.Exception as error:  # its helper is the tests' own
            print(f"without PostgreSQL: {error}", file=sys.stderr, flush=True)
        write_record(self.service_store, record)
        process = self.start_service()
        self.stores[HTTP] = OverHttp(self._wire(process.url), process.pid)
        ready = self.folder / "run" / f"{PEER}.url"
        process = self._desk.start(PEER, buffer_peer.command(HOME / "peers", ready))
        wire = self._wire(process.url)
        self.stores[PEER] = Peer(wire, process.pid, plain=False)
        self.stores[PLAIN] = Peer(wire, process.pid, plain=True)

    @property
    def service_store(self) -> Path:
        """The service's store folder."""
        return self.folder / "service"

    def start_service(self) -> Process:
        """A service process on the service's store."""
        ready = self.folder / "run" / f"{HTTP}.url"
        return self._desk.start(HTTP, role("service", str(self.service_store), TOKEN, str(ready)))

    def restart_service(self) -> OverHttp:
        """Kills the service as a crash would, and starts it again.

        Raises:
            RuntimeError: it did not become ready.
        """
        old = self._desk.find(HTTP)
        assert old is not None, "it runs"
        os.kill(old.pid, signal.SIGKILL)
        self._desk.end(old)
        process = self.start_service()
        return OverHttp(self._wire(process.url), process.pid)

    def _wire(self, url: str) -> Wire:
        wire = Wire(url, TOKEN)
        self._stack.callback(wire.close)
        return wire

    @staticmethod
    def machine() -> dict[str, Any]:
        """What the figures were taken on."""
        return {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "python": sys.version.split()[0]}


@contextlib.contextmanager
def _postgres(folder: Path) -> Iterator[Store]:
    from palestra.server.buffer.postgres import PostgresBuffer
    from tests.postgres import started

    with contextlib.contextmanager(started)(on_disk=True) as server:
        folder.mkdir()
        buffer = PostgresBuffer(server.url(), "benchmark", folder=folder)
        try:
            pid = int((server.folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
            yield InProcess(buffer, pid)
        finally:
            buffer.close()


def role(*words: str) -> Sequence[str]:
    """What starts a role of this benchmark."""
    return [sys.executable, str(ROOT / "benchmarks" / "buffer.py"), "--role", *words]
