"""Folders of boxes on this machine, for backends that have no mounts of their own: BASE/OWNER/NUMBER. Waits for the disk."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile

from palestra.sandbox.keeper import owners

PREFIX = "palestra-boxes-"


def base() -> str:
    """The folder of this user's boxes; it is made.

    Raises:
        OSError: somebody else has made it.
    """
    path = os.path.join(tempfile.gettempdir(), f"{PREFIX}{os.getuid()}")
    try:
        os.mkdir(path, 0o711)
    except FileExistsError:
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise OSError(f"{path} belongs to somebody else; remove it, or set TMPDIR") from None
    os.chmod(path, 0o711)
    return path


def make(where: str, owner: str, number: int, uid: int | None) -> str:
    """A box's folder, for this user alone.

    Raises:
        OSError: it cannot be made, or is there already.
        ValueError: no owner of ours.
    """
    path = _within(where, owner)
    os.makedirs(path, mode=0o711, exist_ok=True)
    path = os.path.join(path, str(int(number)))
    os.mkdir(path, 0o700)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def remove_box(where: str, owner: str, number: int) -> None:
    """Removes a box's folder.

    Raises:
        ValueError: no owner of ours.
    """
    shutil.rmtree(os.path.join(_within(where, owner), str(int(number))), ignore_errors=True)


def remove(where: str, owner: str) -> int:
    """Removes the folders of an owner; how many boxes had one.

    Raises:
        ValueError: no owner of ours.
    """
    folder = _within(where, owner)
    count = len(os.listdir(folder)) if os.path.isdir(folder) else 0
    shutil.rmtree(folder, ignore_errors=True)
    return count


def forsaken(where: str) -> list[str]:
    """Owners that have folders and are dead."""
    return [name for name in os.listdir(where) if owners.dead(name)] if os.path.isdir(where) else []


def _within(where: str, owner: str) -> str:
    """An owner's folder. Whatever is removed here goes through this check: as root a wrong path is the machine."""
    if not owners.is_name(owner) or os.path.basename(where) != f"{PREFIX}{os.getuid()}":
        raise ValueError(f"{where}/{owner} is no folder of boxes")
    return os.path.join(where, owner)
