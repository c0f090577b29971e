"""The run's service as a worker sees it: calls of the client with the run's rule about sampling, and patience while it is away.

In: what the worker does. Out: the service's words. It waits for the service, which may be gone for `PATIENCE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from palestra.agents.plans.types import Masks, SessionRow
from palestra.agents.types import GroupAssignment, ReviewRequest, SessionHandle, Verdict
from palestra.envs.types import Episode, Message
from palestra.server.client import ServiceClient, ServiceError

PATIENCE_S = 20.0
"""How long the service may be unreachable before the worker gives up."""
PAUSE_S = 0.5
"""Between two calls of a service that is away."""


class WorkerService:
    """A `PlanService`."""

    def __init__(self, client: ServiceClient, sampling: str, pause: Callable[[float], object]) -> None:
        """`sampling`: what a session makes of an agent's wishes. `pause`: sleeps, and may be woken."""
        self.client, self.sampling = client, sampling
        self._pause, self._answered = pause, time.monotonic()

    def ask(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment | ReviewRequest | None:
        """As `work`; None also where the service is away for a while.

        Raises:
            ServiceError: it was gone for longer than PATIENCE_S, or refused the call.
        """
        try:
            work = self.work(wait_s, reviews_only=reviews_only)
        except ServiceError as error:
            if error.status or time.monotonic() - self._answered > PATIENCE_S:
                raise
            self._pause(PAUSE_S)
            return None
        self._answered = time.monotonic()
        return work

    def work(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment | ReviewRequest | None:
        """See `ServiceClient.work`."""
        return self.client.work(wait_s, reviews_only=reviews_only)

    def skip(self, group_id: str, reason: str) -> None:
        """See `ServiceClient.skip`."""
        self.client.skip(group_id, reason)

    def verdict(self, group_id: str, verdict: Verdict) -> None:
        """See `ServiceClient.verdict`."""
        self.client.verdict(group_id, verdict)

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        """See `ServiceClient.open_session`."""
        return self.client.open_session(assignment, index, task_id, sampling=self.sampling)

    def close_session(self, handle: SessionHandle, episode: Episode, masks: Masks | None = None) -> None:
        """See `ServiceClient.close_session`."""
        self.client.close_session(handle, episode, masks)

    def conversation(self, handle: SessionHandle) -> Sequence[Sequence[Message]]:
        """See `ServiceClient.conversation`."""
        return self.client.conversation(handle)

    def rows(self, handle: SessionHandle) -> tuple[SessionRow, ...]:
        """See `ServiceClient.rows`."""
        return self.client.rows(handle)

    def waits(self) -> str:
        """Who waits for whom at present."""
        return str(self.client.status()["waits"])

    def committed_step(self) -> int:
        """Train steps that are done."""
        return int(self.client.status()["committed_step"])
