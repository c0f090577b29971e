"""Words of the launchers. A role is `palestra role NAME --config RUN/run.toml`, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class LaunchError(Exception):
    """A role that did not start, did not become ready in time, or ended; the message says which and shows its last words."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role to start."""

    name: str
    """engine, service, worker or trainer."""
    folder: Path
    """The run's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    listeners: tuple[int, ...] = ()
    """Listening sockets of the supervisor that the role answers on, as file descriptors: they outlive the role, so that callers of one that
    is started again wait instead of being refused. Only for launchers of this machine."""


class RoleProcess(Protocol):
    """A started role."""

    name: str

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def stop(self, timeout_s: float) -> int:
        """Asks it to end, waits, and ends it by force after `timeout_s` seconds; its exit status."""

    def kill(self) -> None:
        """Ends it and what it started, at once."""

    def last_words(self) -> str:
        """The end of what it printed."""


class Launcher(Protocol):
    """Starts roles."""

    def start(self, spec: RoleSpec) -> RoleProcess:
        """Starts one role; it is ready when its `/health` answers."""
