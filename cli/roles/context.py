"""What every role starts with: the run's folder and configuration, its log, its address, and the tie to its supervisor.

In: a role's name and the run's `run.toml`. Out: a `RoleContext`. `announce` writes `roles/NAME.json`, which tells the others where the
role is; `peer` reads it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.cli.config import AnyConfig, ConfigError, RunConfig, read_run
from palestra.cli.launch.local import PARENT

_PR_SET_PDEATHSIG = 1


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class RoleContext:
    """A role's surroundings."""

    name: str
    folder: Path
    run: AnyConfig
    """The run's configuration, of whichever kind it is."""
    model: Path
    """The resolved model folder."""

    @property
    def config(self) -> RunConfig:
        """The configuration of a training run, for the roles that only such a run has.

        Raises:
            ConfigError: this is a service's folder.
        """
        if not isinstance(self.run, RunConfig):
            raise ConfigError(f"{self.folder} is no training run: it has no role {self.name}")
        return self.run

    @property
    def token(self) -> str:
        """The run's admin token."""
        return (self.folder / "roles" / "admin.token").read_text().strip()

    def announce(self, url: str, **more: Any) -> None:
        """Tells the others where this role is, and what else they have to know of it."""
        said = {"url": url, "pid": os.getpid(), **more}
        write_atomically(self.folder / "roles" / f"{self.name}.json", json.dumps(said))

    def peer(self, name: str) -> str:
        """The URL of another role.

        Raises:
            ConfigError: it has not announced itself.
        """
        return str(self.announced(name)["url"])

    def announced(self, name: str) -> dict[str, Any]:
        """All that another role said of itself: url, pid, and what `announce` was given beside them.

        Raises:
            ConfigError: it has not announced itself.
        """
        try:
            said: dict[str, Any] = json.loads((self.folder / "roles" / f"{name}.json").read_text())
            return {**said, "url": str(said["url"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"role {name} of {self.folder} has not announced itself: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def enter(name: str, config_path: Path) -> RoleContext:
    """Called first in a role's process."""
    _die_with_parent()
    folder = config_path.resolve().parent
    (folder / "log").mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / "log" / f"{name}.jsonl")
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    meta = json.loads((folder / "meta.json").read_text())
    return RoleContext(name, folder, read_run(folder), Path(meta["model_folder"]))


def _die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the supervisor dies; a supervisor that died before that is noticed by its pid."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit("the supervisor is gone")


def on_stop(callback: Callable[[], None]) -> None:
    """Calls `callback` on SIGTERM; SIGINT is the supervisor's business."""
    signal.signal(signal.SIGTERM, lambda *_: callback())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
