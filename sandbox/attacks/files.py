"""Probes that read or write what is not the box's: files, environments, descriptors, by path, by link, by the box's own interface."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.sandbox.attacks.judges import fails, finished, unseen, untried
from palestra.sandbox.attacks.types import Attack, Judged, Seen
from palestra.sandbox.types import Box, SandboxError

if TYPE_CHECKING:
    from palestra.sandbox.attacks.scene import Scene

_SECRETS = """
def show(path):
    with open(path, "rb") as file:
        os.write(1, file.read(4096))
for path in SCENE["secrets"]:
    for before in ("", "/proc/1/root", "/proc/self/root/../..", "/proc/%d/root" % os.getppid(), "/proc/1/cwd/../..", "/oldroot"):
        attempt(before + path, lambda: show(before + path))
"""

_LINKS = """
for number, path in enumerate(SCENE["secrets"]):
    os.symlink(path, "link-%d" % number)
    os.symlink(os.path.dirname(path), "folder-%d" % number)
    attempt("open-%d" % number, lambda: os.write(1, open("link-%d" % number, "rb").read(4096)))
    attempt("hard-%d" % number, lambda: os.link(path, "hard-%d" % number))
os.symlink("/etc/shadow", "shadow")
os.symlink("/", "root")
"""

_HOST = """
import hashlib
for path in ("/etc/shadow", "/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key", "/proc/1/root/etc/shadow"):
    try:
        with open(path, "rb") as file:
            tell(path, hashlib.sha256(file.read()).hexdigest())
    except OSError as error:
        tell(path, word(error))
for path in ("/root", "/home", "/srv", "/var/lib", "/run", "/boot"):
    try:
        tell(path, hashlib.sha256("\\0".join(sorted(os.listdir(path))).encode()).hexdigest())
    except OSError as error:
        tell(path, word(error))
"""

# Only the planted variable is shown: what else an open machine has there is nobody's business.
_ENVIRONMENT = """
def show(data):
    for part in data.split(b"\\0"):
        if part.startswith(SCENE["secret_name"].encode()):
            os.write(1, b"\\n" + part + b"\\n")
show(b"\\0".join(name + b"=" + value for name, value in os.environb.items()))
try:
    names = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    names = []
seen = 0
for name in names + ["self", "thread-self", str(os.getppid()), str(SCENE["sentinel"])]:
    try:
        with open("/proc/%s/environ" % name, "rb") as file:
            show(file.read())
        seen += 1
    except OSError:
        continue
tell("read", seen)
"""

# The listing's own descriptor is not there any more when it is looked at.
_DESCRIPTORS = """
for number in range(3, 1024):
    try:
        about = os.fstat(number)
    except OSError:
        continue
    tell("fd%d" % number, "DONE")
    try:
        os.write(1, os.pread(number, 4096, 0))
    except OSError:
        continue
tell("looked", "ENOENT")
"""

_WRITES = """
for path in ("/planted", "/usr/planted", "/usr/bin/planted", "/usr/lib/planted", "/etc/planted", "/opt/planted", "/var/planted"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT)))
for path in ("/etc/passwd", "/etc/ld.so.cache", "/usr/bin/python3", "/bin/sh"):
    writable("write " + path, path)
"""

_CHOKE = """
os.mkdir("many")
first = "many/" + "n" * 200
os.symlink("x" * 4000, first)
for number in range(2999):
    os.link(first, first + str(number), follow_symlinks=False)
os.mkfifo("pipe")
deep = "deep"
for _ in range(80):
    os.mkdir(deep)
    deep += "/d"
import socket
try:
    socket.socket(socket.AF_UNIX).bind("end")
except PermissionError:
    tell("socket", "EPERM")
"""

HOST_FILES = ("/etc/shadow", "/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key")
HOST_FOLDERS = ("/root", "/home", "/srv", "/var/lib", "/run", "/boot")


async def _fetch(box: Box, scene: Scene) -> tuple[bytes, dict[str, str]]:
    """Everything that the interface gives of links that lead out."""
    found, answers = bytearray(), {}
    for path in (
        "link-0",
        "folder-0/secret",
        "root/etc/shadow",
        "shadow",
        "../../../../../etc/shadow",
        *map(str, _secrets(scene)),
    ):
        try:
            found += await box.get(path)
            answers[path] = "DONE"
        except SandboxError as error:
            answers[path] = str(error)
    try:
        await box.put("folder-0/planted", b"planted")
        answers["put"] = "DONE"
    except SandboxError as error:
        answers["put"] = str(error)
    with tarfile.open(fileobj=BytesIO(await box.export("."))) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            found += content.read() if content is not None else b""
    return bytes(found), answers


async def _choke(box: Box, scene: Scene) -> tuple[bytes, dict[str, str]]:
    """Asks for folders and files that are made to hold the agent or to burst a frame; each must answer or refuse."""
    answers = {}
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "list": lambda: box.list("many"),
        "export": lambda: box.export(".", max_bytes=1 << 20),
        "pipe": lambda: box.get("pipe"),
        "put pipe": lambda: box.put("pipe", b"x"),
        "socket": lambda: box.get("end"),
        "deep": lambda: box.export("deep"),
    }
    for name, asked in calls.items():
        try:
            await asked()
            answers[name] = "DONE"
        except SandboxError as error:
            answers[name] = type(error).__name__
    return b"", answers


def _secrets(scene: Scene) -> list[Path]:
    return [Path(str(path)) for path in scene.secrets]


def _no_planting(seen: Seen) -> Judged:
    for path in _secrets(seen.scene):
        if (path.parent / "planted").exists():
            return Judged("ESCAPED", "wrote a file out here", str(path))
    return unseen(seen)


def _other_than_here(seen: Seen) -> Judged:
    same = [
        path
        for path in HOST_FILES
        if (mine := _digest(path)) and mine in (seen.said.get(path), seen.said.get("/proc/1/root" + path))
    ]
    same += [path for path in HOST_FOLDERS if (mine := _listing(path)) and seen.said.get(path) == mine]
    detail = " ".join(f"{name}={word[:12]}" for name, word in seen.said.items())
    if same:
        return Judged("ESCAPED", f"read {', '.join(same)}", detail)
    return Judged("contained", "not to be seen", detail) if finished(seen) else untried(seen)


def _digest(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # absent, or not for us either
        return None


def _listing(path: str) -> str | None:
    try:
        names = sorted(os.listdir(path))
    except OSError:  # absent, or not for us either
        return None
    return hashlib.sha256("\0".join(names).encode()).hexdigest() if names else None


def _answers(seen: Seen) -> Judged:
    detail = " ".join(f"{name}={word}" for name, word in seen.attempts.items())
    if not seen.usable or "BoxLostError" in seen.attempts.values():
        return Judged("ESCAPED", "the box was lost", detail)
    good = len(seen.attempts) == 6 and seen.attempts["pipe"] == seen.attempts["put pipe"] == "BoxFileError"
    return Judged("contained", "refused", detail) if good and finished(seen) else untried(seen)


ATTACKS = (
    Attack(
        "secret files", "reads files of the host by path and through /proc", "files", _SECRETS, unseen, harmless=True
    ),
    Attack(
        "links",
        "links to files of the host, followed inside and by the interface",
        "files",
        _LINKS,
        _no_planting,
        act=_fetch,
        harmless=True,
    ),
    Attack(
        "host's own files", "/etc/shadow, keys, /root, /home, /run", "files", _HOST, _other_than_here, harmless=True
    ),
    Attack(
        "environments", "its own environment and everybody's in /proc", "files", _ENVIRONMENT, unseen, harmless=True
    ),
    Attack("descriptors left open", "uses descriptors that it inherited", "files", _DESCRIPTORS, fails),
    Attack("system files", "writes to /, /usr, /etc", "files", _WRITES, fails),
    Attack(
        "ugly folders",
        "3000 long links, pipes, sockets, depth, for who lists them",
        "files",
        _CHOKE,
        _answers,
        act=_choke,
    ),
)
