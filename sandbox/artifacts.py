"""What may cross from the box that a model worked in to the box where its work is graded: regular files that were declared, no more.

In: a box and paths. Out: contents. Waits for the box. Nothing here believes a name that the model could have planted.
"""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Collection, Mapping, Sequence

from palestra.sandbox.types import MIB, Box, BoxFileError, Entry, SandboxError

TESTS = "palestra-tests"
"""Folder of the tests in a box where something is graded, below its home."""

MOST_BYTES = 16 * MIB
MOST_FILES = 256

STEERING = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.pyc",
    "*.egg-info",
    "*.dist-info",
    "__pycache__",
)
"""Names that an interpreter or a test runner obeys only because they are there."""


class ArtifactError(SandboxError):
    """The model did not leave what it was to leave: no such file, no regular one, too large. Its doing, so a verdict of False."""


def check_names(paths: Collection[str], allowed: Collection[str] = ()) -> None:
    """Whether artifacts may have these names.

    Raises:
        ValueError: a name leads out of the folder or into the tests', or steers the test runner and is not in `allowed`.
    """
    if len(paths) > MOST_FILES:
        raise ValueError(f"{len(paths)} artifacts; at most {MOST_FILES} cross")
    for path in paths:
        parts = path.split("/")
        if not path or path.startswith("/") or posixpath.normpath(path) != path or ".." in parts or path == ".":
            raise ValueError(f"artifact {path!r}: give a plain path below the box's home")
        if parts[0] == TESTS:
            raise ValueError(f"artifact {path!r}: {TESTS} is the tests' own folder")
        if path in allowed:
            continue
        for part in parts:
            if any(fnmatch.fnmatchcase(part.lower(), name) for name in STEERING):
                raise ValueError(
                    f"artifact {path!r}: {part} could steer the tests; name the path in `allowed` if it must cross"
                )


async def read_artifacts(box: Box, paths: Sequence[str], max_bytes: int = MOST_BYTES) -> dict[str, bytes]:
    """Contents of these files, after the model's processes are dead. Every folder on the way must be one: links are not followed.

    Raises:
        ArtifactError: see there.
        BoxLostError: the box is gone.
    """
    folders: dict[str, Mapping[str, Entry]] = {}
    found: dict[str, bytes] = {}
    left = max_bytes
    for path in paths:
        entry = await _find(box, path, folders)
        if entry.kind != "file":
            raise ArtifactError(f"{path}: a {entry.kind}, where a regular file was asked for")
        if entry.size > left:
            raise ArtifactError(f"{path}: {entry.size} bytes, where all artifacts may have {max_bytes}")
        try:
            found[path] = await box.get(path, max_bytes=left)
        except BoxFileError as error:
            raise ArtifactError(str(error)) from error
        left -= len(found[path])
    return found


async def _find(box: Box, path: str, folders: dict[str, Mapping[str, Entry]]) -> Entry:
    """What is at this path, each folder on the way looked at once."""
    parts = path.split("/")
    for depth, part in enumerate(parts):
        folder = "/".join(parts[:depth]) or "."
        if folder not in folders:
            try:
                folders[folder] = {entry.name: entry for entry in await box.list(folder)}
            except BoxFileError as error:
                raise ArtifactError(f"{path}: {error}") from error
        entry = folders[folder].get(part)
        if entry is None:
            raise ArtifactError(f"{path}: there is no such file")
        if depth == len(parts) - 1:
            return entry
        if entry.kind != "folder":
            raise ArtifactError(f"{path}: {part} on the way is a {entry.kind}, no folder")
    raise ArtifactError(f"{path}: no path")
