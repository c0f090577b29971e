"""The service's Python client, for trainers and environment workers. Blocking, thread-safe, without torch or a web framework.

In: calls. Out: the service's words as Python values. Every wait has a deadline; connection faults of calls that can be repeated are retried
within it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2 as httpx
import numpy as np
import orjson

from palestra.agents.types import SessionHandle
from palestra.envs.types import Message
from palestra.server.publish_client import PublishCalls
from palestra.server.store.jsonbytes import dumps
from palestra.server.store.types import SessionOutcome
from palestra.server.transcripts import trajectory_of
from palestra.server.types import LeaseLost, RenderedRow, ServerError, Trajectory, TrajectoryGroup
from palestra.server.wire.codec import decode_group, split_blobs
from palestra.server.work_client import WorkCalls, handle_of


class ServiceError(ServerError):
    """The service refused a call or could not be reached; the message says which and why."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class ServiceClient(PublishCalls, WorkCalls):
    """Talks to one rollout service with its admin token."""

    def __init__(self, url: str, admin_token: str, *, timeout_s: float = 120.0, retry_s: float = 20.0) -> None:
        self.url, self.retry_s = url.rstrip("/"), retry_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {admin_token}"},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _call(
        self, method: str, path: str, body: Any = None, *, retry: bool = True, timeout_s: float | None = None
    ) -> bytes:
        """One call; faults of the connection are retried for `retry_s` where repeating is harmless."""
        data = body if isinstance(body, bytes) else None if body is None else dumps(body)
        give_up, delay = time.monotonic() + self.retry_s, 0.1
        extra: dict[str, Any] = {} if timeout_s is None else {"timeout": httpx.Timeout(timeout_s, connect=10.0)}
        while True:
            try:
                answer = self._http.request(method, path, content=data, **extra)
                break
            except httpx.TransportError as error:
                if not retry or time.monotonic() + delay > give_up:
                    raise ServiceError(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
                time.sleep(delay)
                delay = min(delay * 2, 2.0)
        if answer.status_code == 200:
            return bytes(answer.content)
        raise _error_of(answer.status_code, bytes(answer.content), f"{method} {path}")

    def _json(
        self, method: str, path: str, body: Any = None, *, retry: bool = True, timeout_s: float | None = None
    ) -> Any:
        return orjson.loads(self._call(method, path, body, retry=retry, timeout_s=timeout_s))

    # -- what the trainer calls

    def restore(self, *, train_step: int, checkpoint_id: str | None, policy_version: int) -> int:
        """Starts from a checkpoint: commits of later steps are undone, abandoned groups dropped. The next version to publish."""
        body = {"train_step": train_step, "checkpoint_id": checkpoint_id, "policy_version": policy_version}
        return int(self._json("POST", "/admin/restore", body)["next_version"])

    def claim(self, n: int, owner: str, ttl_s: float, deadline_s: float) -> list[TrajectoryGroup]:
        """Exactly `n` groups under a lease of `ttl_s`.

        Raises:
            TimeoutError: they were not ready within `deadline_s`; the message says who was waited for.
        """
        deadline, claim_id = time.monotonic() + deadline_s, uuid.uuid4().hex
        while True:
            wait = min(20.0, deadline - time.monotonic())
            if wait <= 0:
                raise TimeoutError(f"no {n} groups within {deadline_s:.0f} s: {self.status()['waits']}")
            body = {"n": n, "owner": owner, "ttl_s": ttl_s, "wait_s": wait, "claim_id": claim_id}
            raw = self._call("POST", "/admin/claim", body)
            if raw:
                return [decode_group(blob) for blob in split_blobs(raw)]

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        """Extends leases; how many are still held."""
        body = {"group_ids": list(group_ids), "owner": owner, "ttl_s": ttl_s}
        return int(self._json("POST", "/admin/lease", body)["count"])

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        """Gives groups back unread."""
        body = {"group_ids": list(group_ids), "owner": owner, "release": True}
        return int(self._json("POST", "/admin/lease", body)["count"])

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        """Marks groups as trained in `step`, all or none; can be repeated.

        Raises:
            LeaseLost: they are no longer `owner`'s; nothing was marked.
        """
        body = {"step": step, "checkpoint_id": checkpoint_id, "group_ids": list(group_ids), "owner": owner}
        try:
            return int(self._json("POST", "/admin/commit", body)["count"])
        except ServiceError as error:
            if error.code == "lease_lost":
                raise LeaseLost(str(error)) from error
            raise

    def collect(self, oldest_train_step: int) -> None:
        """Lets the service delete what a restore to `oldest_train_step`, the oldest checkpoint kept, cannot need."""
        self._json("POST", "/admin/collect", {"oldest_train_step": oldest_train_step})

    def render(self, transcripts: Sequence[Mapping[str, Any]]) -> list[RenderedRow]:
        """Transcripts ({"messages", "tools"}) as supervised rows."""
        rows = self._json("POST", "/admin/render", {"transcripts": list(transcripts)})
        return [
            RenderedRow(np.asarray(r["token_ids"], dtype=np.int32), np.asarray(r["loss_mask"], dtype=np.uint8))
            for r in rows
        ]

    def step_metrics(self) -> dict[str, float]:
        """Rollout-side figures since the last call."""
        return dict(self._json("GET", "/admin/metrics", retry=False))

    # -- what everybody may ask

    def status(self) -> dict[str, Any]:
        """What goes on, and who waits for whom."""
        return dict(self._json("GET", "/status"))

    def ledger(self) -> dict[str, Any]:
        """Where every sampled token went."""
        return dict(self._json("GET", "/admin/ledger"))

    # -- sessions, for whoever points an agent at one

    def open(
        self,
        *,
        rollout_id: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        task: Any = None,
        task_id: str = "",
        forced: Sequence[Sequence[int]] | None = None,
        **limits: Any,
    ) -> SessionHandle:
        """Opens a session; `limits` are fields of `SessionLimits` (max_turns, max_tokens, deadline_s, temperature, sampling ...). With a
        group_size the group can be claimed once so many sessions of group_id were closed. `forced`: a test's wish for an engine that was
        started for it, the ids of the session's replies call by call.

        Raises:
            ServiceError: the service refused it.
        """
        body = {
            "rollout_id": rollout_id,
            "group_id": group_id,
            "group_size": group_size,
            "task": task,
            "task_id": task_id,
            "limits": limits,
            **({} if forced is None else {"forced": [list(ids) for ids in forced]}),
        }
        return handle_of(self._json("POST", "/v1/sessions", body, retry=False))

    def reward(
        self,
        handle: SessionHandle,
        value: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        turn: int | None = None,
    ) -> None:
        """Keeps a reward, of the session or of one turn, until it is closed; can be repeated, the last one counts."""
        body = {"reward": value, "components": components, "turn": turn, "attempt": handle.attempt}
        self._json("POST", f"/v1/sessions/{handle.rollout_id}/reward", body)

    def close_with(self, handle: SessionHandle, outcome: SessionOutcome | None = None) -> float | None:
        """Ends a session, with an outcome or with the rewards that were posted; can be repeated. Returns the reward that counts; None for
        unknown, or where it had ended before."""
        body = {"attempt": handle.attempt, "api_key": handle.api_key, "outcome": outcome}
        value = self._json("POST", f"/v1/sessions/{handle.rollout_id}/close", body)["reward"]
        return None if value is None else float(value)

    def delete(self, handle: SessionHandle) -> None:
        """Discards an open session: its tokens are on record, and never trained."""
        self._call("DELETE", f"/v1/sessions/{handle.rollout_id}?attempt={handle.attempt}", retry=False)

    def trajectory(self, handle: SessionHandle) -> Trajectory:
        """What is on record of a session: every turn with its ids, logprobs and versions."""
        path = f"/v1/sessions/{handle.rollout_id}/trajectory?attempt={handle.attempt}"
        return trajectory_of(self._json("GET", path))

    def conversation(self, handle: SessionHandle) -> list[list[Message]]:
        """A session's branches in messages, oldest first."""
        path = f"/v1/sessions/{handle.rollout_id}/conversation?attempt={handle.attempt}"
        return list(self._json("GET", path))

    def freeze(self) -> None:
        """Takes all requests off the engines, their partial replies kept, until `thaw`."""
        self._json("POST", "/admin/freeze")

    def thaw(self) -> None:
        """Lets them go on."""
        self._json("POST", "/admin/thaw")


def _error_of(status: int, raw: bytes, call: str) -> ServiceError:
    try:
        error = orjson.loads(raw)["error"]
        return ServiceError(f"{call}: {error['message']}", status, error["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ServiceError(f"{call}: HTTP {status}: {raw[:300].decode(errors='replace')}", status)
