"""Files that are there whole or not at all: written aside, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ASIDE = ".tmp-"
"""Names that begin with this are unfinished and are never read."""


def sync_file(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flushes every file below `folder`, then the folders themselves."""
    for path in folder.rglob("*"):
        sync_file(path)
    sync_file(folder)


@contextlib.contextmanager
def folder_aside(target: Path, *, flush: bool = True) -> Iterator[Path]:
    """Gives an empty folder beside `target`; on success it is flushed and takes `target`'s place, on error it is removed.

    `flush=False` is for what is of no use after a crash of the machine.
    """
    aside = target.parent / f"{ASIDE}{target.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if flush:
            sync_tree(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        sync_file(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces a file's contents, durably."""
    aside = path.parent / f"{ASIDE}{path.name}-{os.getpid()}"
    aside.write_text(text, encoding="utf-8")
    sync_file(aside)
    aside.rename(path)
    sync_file(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Removes what an earlier process left half-written in `folder`."""
    for path in folder.glob(f"{ASIDE}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
