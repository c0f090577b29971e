"""One writer per file: a lock that the kernel gives back when its holder dies, so that kill -9 leaves nothing to
clean up.

Nothing is waited for: a lock that is taken is an error at once, since a second writer on a run's files is always a
mistake.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from palestra.server.types import StoreError


class FileLock:
    """Holds `path` exclusively from construction until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises:
        StoreError: another process holds it, or the file cannot be made.
        """
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened: {error}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StoreError(f"{path}: in use by another process; one service owns a run's store") from error

    def release(self) -> None:
        """Gives it back; once is enough, more do no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
