"""A PostgreSQL server of the tests' own: a new cluster in a temporary folder, reached by a Unix socket there.

In: Debian's `postgresql` package. Out: a `Server` with URLs of its databases, that can be killed and started again. PostgreSQL refuses to
run as root; as root the cluster belongs to an ordinary user. Where the programs are missing, the tests fail and say what to install.
Waits for the server. It ends with the thread that started it, so that one is the main thread.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OWNER = "palestra"
"""The role that owns everything; it needs no password. `LOCKED` needs one."""
LOCKED, PASSWORD = "locked", "hunter2-not-shown"
START_S, STOP_S = 60.0, 20.0
ROOM = 1 << 30
"""Bytes that a cluster in memory may need."""
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "40",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "log_timezone": "UTC",
}


def started(*, on_disk: bool = False) -> Iterator[Server]:
    """Makes a cluster, starts it, yields it, ends and removes it. It lies in memory where there is room, since a kill of processes loses no
    more there than on a disk; measurements want it `on_disk`."""
    memory = Path("/dev/shm")
    in_memory = not on_disk and memory.is_dir() and shutil.disk_usage(memory).free > ROOM
    with tempfile.TemporaryDirectory(prefix="palestra-pg-", dir=memory if in_memory else None) as name:
        server = Server(Path(name))
        try:
            server.start()
            with server.connect() as db:
                db.execute(f"create role {LOCKED} login password '{PASSWORD}'")
            yield server
        finally:
            server.stop()


class Server:
    """One cluster and its server process."""

    def __init__(self, folder: Path) -> None:
        """Makes the cluster in `folder`, a new one of the caller's."""
        self.folder = folder
        self._data = folder / "data"
        self._programs = find_programs()
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = ordinary_user()
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._make()

    def url(self, database: str = "postgres", user: str = OWNER) -> str:
        """Where a database is reached, without a password."""
        return f"postgresql://{user}@/{database}?host={self.folder}"

    def connect(self, database: str = "postgres") -> Any:
        """A plain psycopg connection, for looking at the server from beside the code under test."""
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True)

    def make_database(self, name: str) -> str:
        """A new, empty database; gives its URL."""
        with self.connect() as db:
            db.execute(f'create database "{name}"')
        return self.url(name)

    def start(self) -> None:
        """Starts the server and waits until it accepts connections; after a crash it recovers first."""
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-k", str(self.folder)]
        command += [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=INT", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                **self._user,
            )
        deadline = time.monotonic() + START_S
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{self._log()}")
            time.sleep(0.02)

    def kill9(self) -> None:
        """Kills the server and all its processes as a crash would, and waits until they are gone."""
        assert self._process is not None
        children = _pidfds_of_children(self._process.pid)
        self._process.kill()
        for fd in children:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self._process.wait()
        _await_ends(children, STOP_S)
        self._process = None

    def stop(self) -> None:
        """Ends the server; sessions that are open are ended with it, and nothing is written that only a later start would need."""
        if self._process is None:
            return
        children = _pidfds_of_children(self._process.pid)
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _await_ends(children, STOP_S)
        self._process = None

    def _make(self) -> None:
        command = [str(self._programs / "initdb"), "-D", str(self._data), "-U", OWNER, "--auth=trust", "--no-sync"]
        done = subprocess.run(
            [*command, "--encoding=UTF8", "--locale=C"],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
            timeout=START_S,
            **self._user,
        )
        if done.returncode:
            pytest.fail(f"initdb failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        rules = self._data / "pg_hba.conf"
        rules.write_text(f"local all {LOCKED} scram-sha-256\nlocal all all trust\n")

    def _accepts(self) -> bool:
        import psycopg

        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]


def find_programs() -> Path:
    """The folder of PostgreSQL's programs, the newest there is; Debian keeps them out of the PATH."""
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    found += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    for folder in found:
        if all((folder / name).exists() for name in ("postgres", "initdb")):
            return folder
    pytest.fail("PostgreSQL's server is not installed: apt-get install -y --no-install-recommends postgresql")


def ordinary_user() -> pwd.struct_passwd:
    """Somebody other than root that every Debian knows."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.fail("neither the user postgres nor nobody exists; PostgreSQL does not run as root")


def _pidfds_of_children(parent: int) -> list[int]:
    """Handles of the processes that `parent` started; a handle stays with its process, whatever becomes of the number."""
    fds = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        if _parent_of(pid) != parent:
            continue
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            if _parent_of(pid) == parent:
                fds.append(fd)
            else:
                os.close(fd)
    return fds


def _parent_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def _await_ends(pidfds: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for fd in pidfds:
        ended, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0.0))
        os.close(fd)
        if not ended:
            pytest.fail("a process of the killed PostgreSQL server does not end")
