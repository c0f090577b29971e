"""From a fork of the keeper to a box's first program: its descriptors, group, user and confinement, in the order in which each is still
allowed. Runs in the child alone.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal

from palestra.sandbox import cgroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

CONTROL_FD = 3
"""The agent's socket in every box that the keeper starts."""
FILES_FD = 4
"""The first of a plan's files."""
SAID_BYTES = 2000
"""Of what a program said, its end."""


def become(
    request: dict[str, Any],
    control: int,
    said: int,
    groups: Sequence[str],
    uid: int | None,
    confine: Callable[[dict[str, Any]], None] | None,
) -> NoReturn:
    """Becomes the program of this request; `control` and `said` are its socket and where its errors go. A failure is said there."""
    try:
        os.setsid()
        _descriptors(control, said, request["files"])
        cgroups.enter(groups)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.umask(0o022)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if confine is not None:
            confine(request["confine"])
        os.execve(request["argv"][0], request["argv"], {})
    except BaseException as error:  # noqa: BLE001 - whatever it is, this child must end here and say why
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        os.write(2, f"{where}{text or type(error).__name__}\n".encode("utf-8", "replace"))
    finally:
        os._exit(126)


def _descriptors(control: int, said: int, files: Sequence[bytes]) -> None:
    """0 and 1 are nothing, 2 is `said`, 3 the socket, then the files. All else closes by itself at exec."""
    end = FILES_FD + len(files)
    # First out of the way, so that none is overwritten before it is moved.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end) for fd in (said, control)]
    for data in files:
        fd = os.memfd_create("palestra", os.MFD_CLOEXEC)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for number, fd in enumerate(high, 2):
        os.dup2(fd, number)
