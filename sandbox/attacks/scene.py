"""What probes reach for, all of it our own: listeners on loopback, secrets in files and in an environment, a process to signal.

In: nothing. Out: facts for the probes' code, and looks at what arrived. Waits for nothing: a connection that nobody accepted yet is there
all the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

SECRET_NAME = "PALESTRA_PROBE_SECRET"
SYSV = ("shm", "sem", "msg")


class Scene:
    """The place out here. Enter it before the backend starts, so that the secret is in every environment it could leak from."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(12)
        self.key = 0x70000000 | secrets.randbits(24)
        self._open = contextlib.ExitStack()
        self._sockets: dict[str, socket.socket] = {}
        self._facts: dict[str, object] = {}
        self._sentinel: subprocess.Popen[bytes] | None = None
        self.secrets: list[str] = []

    def __enter__(self) -> Scene:
        try:
            self._plant_files()
            self._listen()
            self._start_sentinel()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def facts(self, name: str) -> dict[str, object]:
        """What the code of the probe of this name may know."""
        return {
            **self._facts,
            "marker": self.marker(name),
            "supervisor": os.getpid(),
            "key": self.key,
            "secret_name": SECRET_NAME,
        }

    def marker(self, name: str) -> str:
        """Stands in the command line of every process that this probe leaves."""
        return f"palestra-probe-{self.token}-{name.replace(' ', '-')}-"

    def arrived(self, name: str) -> bool:
        """Whether somebody came to this listener."""
        with contextlib.suppress(BlockingIOError):
            if name == "udp":
                self._sockets[name].recv(100)
            else:
                self._sockets[name].accept()[0].close()
            return True
        return False

    def sentinel_lives(self) -> bool:
        """Whether the process that probes try to end is there."""
        return self._sentinel is not None and self._sentinel.poll() is None

    def tell_tale(self, found: bytes) -> bool:
        """Whether the secret is in there."""
        return self.token.encode() in found

    def ipc_left(self) -> list[str]:
        """Kinds of System V objects with the probes' key that this machine has."""
        return [kind for kind in SYSV if any(key == self.key for key, _ in _ipc(kind))]

    def _plant_files(self) -> None:
        planted = []
        for place in ("/tmp", "/var/tmp", "/dev/shm"):
            if not os.access(place, os.W_OK):
                continue
            folder = Path(tempfile.mkdtemp(prefix="palestra-probe-", dir=place))
            self._open.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.chmod(0o755)
            (folder / "secret").write_text(f"secret {self.token}\n")
            planted.append(str(folder / "secret"))
        self.secrets = planted
        self._facts["secrets"] = planted
        self._folder = Path(planted[0]).parent
        # A descriptor that a careless start would hand on.
        fd = os.open(planted[0], os.O_RDONLY)
        self._open.callback(os.close, fd)
        os.set_inheritable(fd, True)
        before = os.environ.get(SECRET_NAME)
        os.environ[SECRET_NAME] = self.token
        self._open.callback(_restore_environment, before)

    def _listen(self) -> None:
        self._facts["tcp"] = self._listener("tcp", socket.AF_INET, ("127.0.0.1", 0))[1]
        self._facts["udp"] = self._listener("udp", socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM)[1]
        with contextlib.suppress(OSError):  # a machine without IPv6
            self._facts["tcp6"] = self._listener("tcp6", socket.AF_INET6, ("::1", 0))[1]
        abstract = f"palestra-probe-{self.token}"
        self._listener("abstract", socket.AF_UNIX, f"\0{abstract}")
        self._facts["abstract"] = abstract
        path = str(self._folder / "socket")
        self._listener("unix", socket.AF_UNIX, path)
        os.chmod(path, 0o777)
        self._facts["unix"] = path

    def _listener(self, name: str, family: int, address: object, kind: int = socket.SOCK_STREAM) -> tuple[str, int]:
        listener = self._open.enter_context(socket.socket(family, kind))
        listener.setblocking(False)
        listener.bind(address)  # type: ignore[arg-type] # a pair or a name, by family
        if kind == socket.SOCK_STREAM:
            listener.listen(8)
        self._sockets[name] = listener
        bound = listener.getsockname()
        return (str(bound[0]), int(bound[1])) if isinstance(bound, tuple) else (str(bound), 0)

    def _start_sentinel(self) -> None:
        # Its environment holds the secret, as a supervisor's would hold keys.
        code = "import sys; sys.stdin.read()"
        self._sentinel = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE)
        self._open.callback(_end, self._sentinel)
        self._facts["sentinel"] = self._sentinel.pid
        self._open.callback(_remove_ipc, self.key)


def survivors(marker: str) -> list[int]:
    """Processes whose command line holds the marker, ended ones that nobody collected left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if marker.encode() in file.read():
                        found.append(int(name))
            except OSError:  # it ended meanwhile
                continue
    return found


def _restore_environment(before: str | None) -> None:
    os.environ.pop(SECRET_NAME, None)
    if before is not None:
        os.environ[SECRET_NAME] = before


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _ipc(kind: str) -> list[tuple[int, int]]:
    """Key and id of each object of this kind."""
    try:
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    except OSError:  # a kernel without them
        return []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def _remove_ipc(key: int) -> None:
    """What a probe got out here is removed again."""
    for kind in SYSV:
        for found, number in _ipc(kind):
            if found == key:
                flag = {"shm": "-m", "sem": "-s", "msg": "-q"}[kind]
                subprocess.run(["ipcrm", flag, str(number)], check=True)
