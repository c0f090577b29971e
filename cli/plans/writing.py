"""Writes an export's files: into a folder that is new or empty, or over files of the same names where that is asked for.

In: texts by their paths. Out: files; nothing is ever removed. A reader sees a file whole or not at all. Waits for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from palestra.cli.config import ConfigError
from palestra.cli.roles.context import write_atomically


def write_files(folder: Path, files: Mapping[str, str], force: bool = False) -> None:
    """Writes them all. `force`: the folder may have files already.

    Raises:
        ConfigError: it has, without `force`; it is no folder; a path leads out of it; or the disk refused, and what was written stays.
    """
    if leading := [name for name in files if not _inside(name)]:
        raise ConfigError(f"{leading[0]}: no file below the export's folder")
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is no folder")
        if not force and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder, or write over its files with --force")
        for name, text in files.items():
            path = folder / name
            write_atomically(path, text)
            if name.endswith(".sh"):
                path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
