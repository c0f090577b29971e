"""The service's client as an evaluator uses it: sessions that are on record as evaluation, and which versions sampled them.

In: calls. Out: sessions and version numbers. Waits as `ServiceClient` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.agents.types import AgentError, SessionHandle
from palestra.server.client import ServiceClient, ServiceError
from palestra.server.ledger import EVALUATION


class EvalClient(ServiceClient):
    """Opens evaluation sessions at one rollout service."""

    def open_evaluation(
        self, rollout_id: str, group_id: str, task_id: str, limits: Mapping[str, Any], about: Mapping[str, Any]
    ) -> SessionHandle:
        """A session that gets the sampling that it asks for, counts as discarded(evaluation) in the ledger, and never reaches the buffer.
        `limits`: fields of `SessionLimits`; `about` is kept with it, for the reader.

        Raises:
            AgentError: the service refused it or is gone.
        """
        body = {
            "rollout_id": rollout_id,
            "group_id": group_id,
            "task_id": task_id,
            "limits": {**limits, "sampling": "free"},
            "meta": {**about, "purpose": EVALUATION},
        }
        try:
            said = self._json("POST", "/v1/sessions", body, retry=False)
        except ServiceError as error:
            raise AgentError(str(error)) from error
        return SessionHandle(
            said["rollout_id"], said["attempt"], said["base_url"], said["api_key"], said["session_url"]
        )

    def versions_of(self, handle: SessionHandle) -> frozenset[int]:
        """The policy versions that sampled the tokens of a session's delivered turns.

        Raises:
            ServiceError: the service refused the call or is gone.
        """
        turns = self.trajectory(handle).turns
        return frozenset(
            span.version for turn in turns if turn.delivered for span in turn.spans if span.end > span.start
        )
