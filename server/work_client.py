"""A worker's calls: what to play and to review, the sessions of its rollouts, and what becomes of its groups. Blocking and thread-safe.

In: what the worker did. Out: the service's words. It waits for the service alone; `work` waits as long as it is told to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.agents.plans.types import MaskRefusedError, Masks, SessionRow
from palestra.agents.types import (
    AgentError,
    GroupAssignment,
    PlayedRollout,
    ReviewRequest,
    SessionHandle,
    Verdict,
)
from palestra.envs.tasks import task_from_json
from palestra.envs.types import Episode, Task
from palestra.server.store.types import outcome_of
from palestra.server.types import ServerError, TokenSource

_SOURCES = {int(source): source.name.lower() for source in TokenSource}


class WorkCalls:
    """What `ServiceClient` has for workers."""

    def _json(
        self, method: str, path: str, body: Any = None, *, retry: bool = True, timeout_s: float | None = None
    ) -> Any:
        raise NotImplementedError

    def register_worker(
        self,
        tasks: int | None,
        *,
        weights: Sequence[float] | None = None,
        reviews: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Says what this worker's environment and program are like: how many tasks there are (None: as many as are asked for), how often
        each is drawn, whether complete groups are to be reviewed, and whether the same actions give the same observations."""
        body = {"tasks": tasks, "weights": weights, "reviews": reviews, "deterministic": deterministic}
        self._json("POST", "/admin/worker", body)

    def work(self, wait_s: float, *, reviews_only: bool = False) -> GroupAssignment | ReviewRequest | None:
        """What is to be played or reviewed next, or None where nothing came within `wait_s`. Never repeated: an answer that is lost is an
        assignment that the service believes to be playing, which its own deadline finds."""
        value = self._json("POST", "/admin/work", {"wait_s": wait_s, "reviews_only": reviews_only}, retry=False)
        if value is None:
            return None
        task: Task | int = value["task"] if isinstance(value["task"], int) else task_from_json(value["task"])
        if value["kind"] == "review":
            return ReviewRequest(value["group_id"], task, tuple(PlayedRollout(**one) for one in value["rollouts"]))
        return GroupAssignment(
            group_id=value["group_id"],
            group_size=value["group_size"],
            attempt=value["attempt"],
            task=task,
            seed=value["seed"],
            indices=tuple(value["indices"]),
            replay=value["replay"],
        )

    def skip(self, group_id: str, reason: str) -> None:
        """Refuses a task before it is played: its group is dropped as filtered(reason), its place is free again; can be repeated."""
        self._json("POST", "/admin/skip", {"group_id": group_id, "reason": reason})

    def verdict(self, group_id: str, verdict: Verdict) -> None:
        """Says what becomes of a group; rollouts of it that go on are ended. Can be repeated."""
        body = {
            "group_id": group_id,
            "keep": verdict.keep,
            "reason": verdict.reason,
            "rewards": {str(index): reward for index, reward in verdict.rewards.items()},
        }
        self._json("POST", "/admin/verdict", body)

    def open_session(
        self, assignment: GroupAssignment, index: int, task_id: str, *, sampling: str | None = None
    ) -> SessionHandle:
        """Opens the session of rollout `index`; `sampling`: what it makes of an agent's own wishes, see `SessionLimits`.

        Raises:
            AgentError: the service refused it or is gone.
        """
        body = {
            "rollout_id": f"{assignment.group_id}-{index}",
            "attempt": assignment.attempt,
            "group_id": assignment.group_id,
            "task_id": task_id,
            "index": index,
            "sampling": sampling,
            "replay": assignment.replay,
        }
        try:
            return handle_of(self._json("POST", "/v1/sessions", body, retry=False))
        except ServerError as error:
            raise AgentError(str(error)) from error

    def close_session(self, handle: SessionHandle, episode: Episode, masks: Masks | None = None) -> None:
        """Ends a session with its episode; can be repeated. `masks`: made by hand, one per row; None: all that was sampled is trained.

        Raises:
            MaskRefusedError: law 2 refuses a mask; the session stays open.
            AgentError: the service is gone.
        """
        body = {
            "attempt": handle.attempt,
            "api_key": handle.api_key,
            "outcome": outcome_of(episode),
            "infra_if_faulted": True,
            "masks": None if masks is None else [list(mask) for mask in masks],
        }
        try:
            self._json("POST", f"/v1/sessions/{handle.rollout_id}/close", body)
        except ServerError as error:
            if getattr(error, "code", "") == "mask_refused":
                raise MaskRefusedError(str(error)) from error
            raise AgentError(str(error)) from error

    def rows(self, handle: SessionHandle) -> tuple[SessionRow, ...]:
        """A session's rows as they stand, one per branch.

        Raises:
            AgentError: the service does not know the session, or is gone.
        """
        try:
            said = self._json("GET", f"/v1/sessions/{handle.rollout_id}/rows?attempt={handle.attempt}")
        except ServerError as error:
            raise AgentError(str(error)) from error
        return tuple(
            SessionRow(
                token_ids=tuple(row["token_ids"]),
                sources=tuple(_SOURCES[source] for source in row["sources"]),
                logprobs=tuple(row["logprobs"]),
                spans=tuple((version, start, end) for version, start, end in row["spans"]),
            )
            for row in said["rows"]
        )


def handle_of(value: Mapping[str, Any]) -> SessionHandle:
    """An opened session as the service tells it."""
    return SessionHandle(
        value["rollout_id"], value["attempt"], value["base_url"], value["api_key"], value["session_url"]
    )
