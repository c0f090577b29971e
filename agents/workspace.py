"""Folders of episodes: each agent plays in one of its own. A session's handle goes in, an empty folder comes out, and is removed afterwards
unless it is kept for the reader. Nothing is waited for but the disk.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from palestra.agents.types import SessionHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Where the folders of episodes are made."""

    parent: Path | None = None
    """None: the system's folder for temporary files."""
    keep: bool = False
    """They stay for the reader."""

    @contextmanager
    def open(self, handle: SessionHandle) -> Iterator[Path]:
        """A fresh folder for one episode."""
        if self.parent is not None:
            self.parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{handle.rollout_id}-{handle.attempt}-")
        folder = Path(tempfile.mkdtemp(prefix=f"palestra-{name}", dir=self.parent)).resolve()
        try:
            yield folder
        finally:
            if not self.keep:
                remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Removes a folder that an agent wrote, what it made read-only too. What cannot be removed stays, and is logged."""
    try:
        shutil.rmtree(folder)
        return
    except OSError as error:
        logger.debug("%s: %s; once more with all rights", folder, error)
    try:
        for root, folders, _ in os.walk(folder):
            for name in folders:
                path = os.path.join(root, name)
                if not os.path.islink(path):
                    os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("the workspace %s could not be removed whole: %s", folder, error)
