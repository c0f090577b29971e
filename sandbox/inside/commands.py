"""Programs in the box: which one a command means, and how it is started.

In: a request with `argv`. Out: a process. A fork copies the agent's page tables, and is paid for again by faults on both sides; a spawn
copies nothing, so it is how programs are started wherever limits can be inherited. Waits for nothing.
"""

from __future__ import annotations

import errno
import os

from . import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator
    from typing import Any
else:
    import _signal as signal  # signal itself loads enum, which takes a third of a box's start

RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the agent ignores, and programs do not."""


def words(argv: list[str] | str) -> list[str]:
    """The command as a list; a text is a line of shell."""
    if isinstance(argv, str):
        shell = next((path for path in ("/bin/bash", "/bin/sh") if os.path.exists(path)), "/bin/sh")
        return [shell, "-c", argv]
    return argv


def places(name: str, path: str) -> Iterator[str]:
    """Where a program of this name may be. (os.execvp would do this, but imports `warnings`, which took half of a short command's time.)"""
    for folder in [""] if "/" in name else path.split(":"):
        yield os.path.join(folder, name)


def run(request: dict[str, Any]) -> None:
    """In a forked child: becomes the program.

    Raises:
        OSError: it is not there, or may not be run.
    """
    argv = words(request["argv"])
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    refused: OSError | None = None
    for path in places(argv[0], os.environ.get("PATH", "")):
        try:
            os.execv(path, argv)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused = refused or error
    if refused is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    refused.filename = argv[0]
    raise refused


def spawn(request: dict[str, Any], fds: list[int]) -> int:
    """Starts the program with these as its descriptors from 0 on; all others of ours close by themselves.

    Raises:
        OSError: it cannot be started. Who wants to know more forks, and has the child say it.
        NotImplementedError: this C library has no such call.
    """
    argv = words(request["argv"])
    env = {**os.environ, **(request.get("env") or {})}
    os.chdir(files.at(request.get("cwd") or "."))
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
    for path in places(argv[0], env.get("PATH", "")):
        try:
            pid = os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=RESET)
        except (FileNotFoundError, NotADirectoryError):
            continue
        _offer(pid)
        return pid
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])


def _offer(pid: int) -> None:
    """Makes it the kernel's first choice when memory runs out, before the agent."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
    except OSError:  # it has ended, or this box has no /proc
        return
    try:
        os.write(fd, b"1000")
    except ProcessLookupError:
        return
    finally:
        os.close(fd)
