"""Files of the box, read and written by its agent in pieces. Links are not followed to their last step, and nothing but regular files is
opened for long: a pipe that was planted must not hold the agent. Waits for the disk alone.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HOME = "/workspace"
"""Where relative paths begin; the agent sets it where a box's own folder is elsewhere."""

PLACES: dict[str, str] = {}
"""Where /workspace and /tmp are, in a box that has no root of its own."""

MOST = 3000
"""Names in one answer."""


def at(path: str) -> str:
    """The absolute path."""
    path = os.path.normpath(os.path.join(HOME, path))
    if any(_below(path, real) for real in PLACES.values()):  # the box's folder may itself be below /tmp
        return path
    return next((real + path[len(name) :] for name, real in PLACES.items() if _below(path, name)), path)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def write(request: dict[str, Any]) -> dict[str, Any]:
    """A piece of a file; the first one (offset 0) makes it anew, with the folders above it.

    Raises:
        OSError: it cannot be written.
    """
    path = at(request["path"])
    offset = int(request["offset"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CREAT
    fd = os.open(path, flags, 0o600)
    try:
        _regular(fd, path)
        if offset == 0:
            os.ftruncate(fd, 0)
            os.fchmod(fd, int(request["mode"]) & 0o777)
        data = memoryview(request["data"])
        while data:
            done = os.pwrite(fd, data, offset)
            offset += done
            data = data[done:]
    finally:
        os.close(fd)
    return {}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """A piece of a regular file, and how long the whole is.

    Raises:
        OSError: it cannot be read.
    """
    path = at(request["path"])
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _regular(fd, path)
        size = os.fstat(fd).st_size
        return {"data": os.pread(fd, min(int(request["size"]), 1 << 20), int(request["offset"])), "size": size}
    finally:
        os.close(fd)


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """Names in a folder, sorted, at most `MOST`: five lists of one length.

    Raises:
        OSError: it cannot be read.
    """
    names, kinds, sizes, modes, targets = [], [], [], [], []
    with os.scandir(at(request["path"])) as entries:
        found = sorted((entry for _, entry in zip(range(MOST), entries)), key=lambda entry: entry.name)  # noqa: B905 - Python 3.9
    for entry in found:
        about = entry.stat(follow_symlinks=False)
        names.append(entry.name)
        sizes.append(about.st_size)
        kinds.append(_kind(about.st_mode))
        modes.append(stat.S_IMODE(about.st_mode))
        targets.append(os.readlink(entry.path) if stat.S_ISLNK(about.st_mode) else "")
    return {"names": names, "kinds": kinds, "sizes": sizes, "modes": modes, "targets": targets}


def folder(request: dict[str, Any]) -> dict[str, Any]:
    """Makes a folder, with those above it; one that is there is left as it is.

    Raises:
        OSError: it cannot be made.
    """
    os.makedirs(at(request["path"]), exist_ok=True)
    return {}


def link(request: dict[str, Any]) -> dict[str, Any]:
    """Makes a symbolic link; one of that name is replaced.

    Raises:
        OSError: it cannot be made.
    """
    path = at(request["path"])
    if os.path.islink(path):
        os.unlink(path)
    os.symlink(request["target"], path)
    return {}


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def _regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(22, "no regular file", path)
