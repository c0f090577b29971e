"""Words of the environment host. Loads nothing heavy; waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from palestra.server.types import ServerError

MIB = 1 << 20


class EnvRefusal(ServerError):
    """A request that is not done: `status` is the HTTP status, `code` one of OpenEnv's words."""

    def __init__(self, message: str, status: int, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s

    @property
    def data(self) -> dict[str, Any]:
        """What an error message carries. OpenEnv's clients read `message` and `code`."""
        return {"message": str(self), "code": self.code, "status": self.status}


INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR = "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR"
EXECUTION_ERROR, CAPACITY_REACHED, FACTORY_ERROR = "EXECUTION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR"
SESSION_ERROR = "SESSION_ERROR"
"""OpenEnv's codes (openenv 0.10.0, core/env_server/types.py): its clients show them."""


@dataclass(frozen=True, slots=True)
class Served:
    """Which environment is served."""

    env_id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its constructor; plain JSON, since they travel to its processes."""


@dataclass(frozen=True, slots=True)
class EnvHostSettings:
    """Limits of a host."""

    max_envs: int = 64
    """Most environments at a time, a process each; further ones are refused."""
    idle_s: float = 600.0
    """An environment that is asked nothing for so long is ended, seconds."""
    step_s: float = 60.0
    """Longest reset or step; the process of one that takes longer is ended, seconds."""
    start_s: float = 60.0
    """Longest construction of an environment, seconds."""
    memory_bytes: int = 1024 * MIB
    """What a process may allocate beyond what it starts with. 0: no limit."""


@dataclass(frozen=True, slots=True)
class About:
    """What is known of the environment that is served."""

    name: str
    description: str
    version: str
    tasks: int
    """How many tasks of its own it has."""
    tools: tuple[dict[str, Any], ...]
    """In OpenAI's form."""


class Phase(IntEnum):
    """What an environment's process is doing."""

    STARTING = 0
    WAITING = 1
    """For its client."""
    WORKING = 2
    """On a reset or a step."""
    SENDING = 3
    """Its client does not read fast enough."""
