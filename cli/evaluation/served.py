"""Sessions of a running `palestra serve` for an evaluation: every token of it is on record there, and none is trained on.

The folder of the service goes in, a `SessionHost` comes out. It waits for the service.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from palestra.agents.evaluation.types import EvalSpec
from palestra.agents.types import AgentError, GroupAssignment, SessionHandle
from palestra.cli.config import ConfigError
from palestra.envs.types import Episode, Message
from palestra.server.client import ServiceClient, ServiceError


class ServedHost:
    """Opens a session per episode, which gets the sampling that it asks for."""

    def __init__(self, folder: Path, spec: EvalSpec) -> None:
        """Raises:
        ConfigError: nothing is served there.
        """
        try:
            addresses = json.loads((folder / "serve.json").read_text())
            token = (folder / "roles" / "admin.token").read_text().strip()
            self.url, control = str(addresses["url"]), str(addresses["control_url"])
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"--service {folder}: is no folder of `palestra serve`: {error}") from None
        self._spec = spec
        self._client = ServiceClient(control, token)
        try:
            self._client.status()
        except ServiceError as error:
            self._client.close()
            raise ConfigError(f"--service {folder}: nothing is served there: {error}") from None
        self._run = secrets.token_hex(4)  # the same episode can be played by several evaluations

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`."""
        group, spec = f"eval-{self._run}-{assignment.group_id}", self._spec
        try:
            return self._client.open(
                rollout_id=f"{group}-{index}",
                group_id=group,
                task_id=task_id,
                max_turns=spec.max_turns,
                max_response=spec.max_tokens,
                temperature=spec.temperature,
                # The episode has its own deadline; the session's is for one whose player died.
                deadline_s=2 * spec.deadline_s,
                sampling="free",
            )
        except ServiceError as error:
            raise AgentError(str(error)) from error

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """See `SessionHost`."""
        self._client.close_session(handle, episode)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `SessionHost`."""
        return self._client.conversation(handle)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
