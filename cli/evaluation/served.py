"""Sessions of a rollout service for an evaluation: every token of it is on record there, and none is trained on.

A client of the service goes in, a `SessionHost` comes out. It waits for the service.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.agents.evaluation.types import EvalSpec
from palestra.agents.types import GroupAssignment, SessionHandle
from palestra.cli.config import ConfigError
from palestra.envs.types import Episode, Message
from palestra.server.client import ServiceError
from palestra.server.eval_client import EvalClient

logger = logging.getLogger(__name__)


def served(folder: Path) -> tuple[EvalClient, str]:
    """A client of the service that `palestra serve` runs in a folder, and the URL of its model routes.

    Raises:
        ConfigError: nothing is served there.
    """
    try:
        addresses = json.loads((folder / "serve.json").read_text())
        token = (folder / "roles" / "admin.token").read_text().strip()
        url, control = str(addresses["url"]), str(addresses["control_url"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"--service {folder}: is no folder of `palestra serve`: {error}") from None
    client = EvalClient(control, token)
    try:
        client.status()
    except ServiceError as error:
        client.close()
        raise ConfigError(f"--service {folder}: nothing is served there: {error}") from None
    return client, url


class ServedHost:
    """Opens a session per episode, which gets the sampling that it asks for. Thread-safe."""

    def __init__(self, client: EvalClient, spec: EvalSpec, about: Mapping[str, Any] | None = None) -> None:
        """`about`: kept with every session, for the reader."""
        self._client, self._spec, self._about = client, spec, dict(about or {})
        self._run = secrets.token_hex(4)  # the same episode can be played by several evaluations
        self._open: dict[str, SessionHandle] = {}
        self._lock = threading.Lock()

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `SessionHost`."""
        group, spec = f"eval-{self._run}-{assignment.group_id}", self._spec
        limits = {
            "max_turns": spec.max_turns,
            "max_response": spec.max_tokens,
            "temperature": spec.temperature,
            # The episode has its own deadline; the session's is for one whose player died.
            "deadline_s": 2 * spec.deadline_s,
        }
        handle = self._client.open_evaluation(f"{group}-{index}", group, task_id, limits, self._about)
        with self._lock:
            self._open[handle.rollout_id] = handle
        return handle

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        """See `SessionHost`."""
        with self._lock:
            known = self._open.pop(handle.rollout_id, None)
        if known is not None:
            self._client.close_session(handle, episode)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `SessionHost`."""
        return self._client.conversation(handle)

    def abandon(self) -> int:
        """Discards what is still open, so that engines sample no more for episodes that nobody waits for; how many there were."""
        with self._lock:
            left, self._open = list(self._open.values()), {}
        for handle in left:
            try:
                self._client.delete(handle)
            except ServiceError as error:
                logger.warning("session %s could not be discarded: %s", handle.rollout_id, error)
        return len(left)
