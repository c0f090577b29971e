"""What an evaluation stood on: versions, commits and the machine, so that its figures can be matched to code later.

A gymnasium id goes in, plain JSON comes out. It waits for `git`, a few seconds at most; what cannot be told is None.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.envs.registry import load_env_class

logger = logging.getLogger(__name__)

PACKAGES = ("palestra", "gymnasium", "openai", "numpy", "pydantic")
GIT_DEADLINE_S = 10.0


def provenance(env_id: str) -> dict[str, Any]:
    """Versions and commits of an evaluation of `env_id`.

    Raises:
        EnvError: there is no such environment.
    """
    cls = load_env_class(env_id)
    return {
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "env": {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            **_distribution(cls.__module__),
            "git": _git_state_once(_file_of(cls)),
        },
        "palestra_git": _git_state_once(Path(__file__)),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution(module: str) -> Mapping[str, Any]:
    """Which distribution a module belongs to; both None for a file of the user's own."""
    top = module.partition(".")[0]
    names = ["palestra"] if top == "palestra" else _distributions().get(top, [])
    return (
        {"distribution": names[0], "version": _version(names[0])} if names else {"distribution": None, "version": None}
    )


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """By top-level module. Looking through all that is installed takes a second."""
    return importlib.metadata.packages_distributions()


def _file_of(cls: type) -> Path | None:
    try:
        return Path(inspect.getfile(cls))
    except (TypeError, OSError):
        return None


def git_state(path: Path | None) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository that tracks the file; None where none does."""
    if path is None or not path.exists():
        return None
    real = path.resolve()
    if _git(real.parent, "ls-files", "--error-unmatch", real.name) is None:
        return None
    commit, changes = _git(real.parent, "rev-parse", "HEAD"), _git(real.parent, "status", "--porcelain")
    if commit is None:
        return None
    return {"commit": commit.strip(), "dirty": None if changes is None else bool(changes.strip())}


_git_state_once = functools.cache(git_state)
"""What a process runs is what it loaded when it began."""


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where it refuses or is not there."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=GIT_DEADLINE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("git cannot be asked: %s", error)
        return None
    return done.stdout if done.returncode == 0 else None
