"""Folders that a box's user could not reach, such as those below a 0700 home, put where it can: bind mounts in a mount namespace of the
keeper's own, which end with it. Root only. Waits for nothing.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 0x1000, 0x4000, 0x80000


class Stage:
    """Sources by where they are."""

    def __init__(self, base: str) -> None:
        """`base` is a folder that everybody can pass through."""
        self._folder = os.path.join(base, "stage")
        self._paths: dict[str, str] = {}

    def put(self, source: str) -> str:
        """Where other users reach this folder or file.

        Raises:
            OSError: it cannot be had, such as for want of rights.
        """
        if not self._paths:
            self._open()
        if source not in self._paths:
            path = os.path.join(self._folder, str(len(self._paths)))
            if os.path.isdir(source):
                os.mkdir(path)
            else:
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
            _mount(source, path, None, MS_BIND | MS_REC)
            self._paths[source] = path
        return self._paths[source]

    def _open(self) -> None:
        """A mount namespace of our own, in which what others mount still comes up, and room for mount points in it."""
        os.makedirs(self._folder, mode=0o711, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "a mount namespace of the keeper's own is refused")
        _mount("none", "/", None, MS_REC | MS_SLAVE)
        _mount("palestra", self._folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0711,size=1m")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    if libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)} (mounting {source})", target)
