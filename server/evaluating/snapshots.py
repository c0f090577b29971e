"""The weights that an evaluation is about: kept as a folder of hard links while the run goes on and writes others.

A flat folder goes in (a Hugging Face model), another name for the same files comes out, for no space and no time. Only files that this
module's own folder lists are removed, by their names, and never what lies deeper. Waits for the disk only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from palestra.server.evaluating.types import EvaluatingError


def link_folder(source: Path, target: Path) -> None:
    """Gives the files of `source` a second name in `target`, which appears whole or not at all; copies where the disk has no links.

    Raises:
        EvaluatingError: they cannot be read, linked or copied.
    """
    aside = target.with_name(f".{target.name}.aside")
    try:
        remove_folder(aside)
        aside.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            if path.is_file():
                _second(path, aside / path.name)
        remove_folder(target)
        aside.rename(target)
    except OSError as error:
        raise EvaluatingError(f"{source} cannot be kept for an evaluation: {error}") from error


def _second(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, name)


def remove_folder(folder: Path) -> None:
    """Removes a flat folder of plain files; one that is not there is no fault, and one that holds anything else stays.

    Raises:
        OSError: it holds a folder, or is not ours to change.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
