"""The HTTP routes of sessions: open, look, reward, close, discard. Thin functions; all of them need the admin token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from palestra.server.gateway.opening import CloseBody, OpenSession, RewardBody
from palestra.server.routes import body_as, reply, require_admin, service_of
from palestra.server.rows import rows_of_open
from palestra.server.store.jsonbytes import dumps
from palestra.server.transcripts import branches, row_json, trajectory_json
from palestra.server.types import SessionError

sessions = APIRouter()
BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/sessions": OpenSession,
    "/v1/sessions/{rollout_id}/reward": RewardBody,
    "/v1/sessions/{rollout_id}/close": CloseBody,
}
"""Bodies of these routes by path, for the API's description."""


def attempt_of(request: Request) -> int | None:
    """`?attempt=N`; None: the newest.

    Raises:
        SessionError: 400.
    """
    said = request.query_params.get("attempt")
    if said is None:
        return None
    if not (said.isascii() and said.isdigit() and len(said) < 10):
        raise SessionError(f"attempt must be a number, got {said[:100]!r}")
    return int(said)


@sessions.post("/v1/sessions")
async def open_session(request: Request) -> Response:
    """Opens a session; its key and URLs come back."""
    require_admin(request)
    service = service_of(request)
    session, key = await service.desk.open(await body_as(request, OpenSession))
    base = service.base_url or f"{request.url.scheme}://{request.url.netloc}"
    return reply(
        {
            "rollout_id": session.record.rollout_id,
            "attempt": session.record.attempt,
            "group_id": session.record.group_id,
            "index": session.record.index,
            "api_key": key,
            "base_url": f"{base}/v1",
            "session_url": f"{base}/sessions/{key}/v1",
            "anthropic_base_url": base,
            "limits": asdict(session.limits),
        }
    )


@sessions.get("/v1/sessions/{rollout_id}")
async def look(request: Request, rollout_id: str) -> Response:
    """How an open session stands."""
    require_admin(request)
    session = service_of(request).sessions.by_id(rollout_id, attempt_of(request))
    said: dict[str, Any] = {
        "rollout_id": session.record.rollout_id,
        "attempt": session.record.attempt,
        "group_id": session.record.group_id,
        "turns": session.turns,
        "calls": session.started,
        "sampled_tokens": session.sampled,
        "running": sum(len(call.rids) for call in session.calls.values()),
        "seconds_left": session.seconds_left,
        "limits": asdict(session.limits),
    }
    return reply(said)


@sessions.delete("/v1/sessions/{rollout_id}")
async def delete(request: Request, rollout_id: str) -> Response:
    """Discards an open session: nothing of it is trained."""
    require_admin(request)
    await service_of(request).desk.discard(rollout_id, attempt_of(request), "deleted")
    return reply({"deleted": True})


@sessions.post("/v1/sessions/{rollout_id}/reward")
async def reward(request: Request, rollout_id: str) -> Response:
    """Keeps a reward until the session is closed."""
    require_admin(request)
    await service_of(request).desk.reward(rollout_id, await body_as(request, RewardBody))
    return reply({"ok": True})


@sessions.post("/v1/sessions/{rollout_id}/close")
async def close(request: Request, rollout_id: str) -> Response:
    """Ends a session, with the outcome in the body or the one that posted rewards make."""
    require_admin(request)
    service, body = service_of(request), await body_as(request, CloseBody)
    if body.masks is not None:
        await service.keep_masks(rollout_id, body.attempt, body.masks)
    outcome = await service.desk.close(rollout_id, body)
    return reply({"closed": True, "reward": None if outcome is None else outcome.reward})


@sessions.get("/v1/sessions/{rollout_id}/trajectory")
async def trajectory(request: Request, rollout_id: str) -> Response:
    """All that is on record of a session, open or ended: turns with their ids and logprobs."""
    require_admin(request)
    found = service_of(request).log.reader.read_trajectory(rollout_id, attempt_of(request))
    return Response(dumps(trajectory_json(found)), media_type="application/json")


@sessions.get("/v1/sessions/{rollout_id}/rows")
async def rows(request: Request, rollout_id: str) -> Response:
    """A session's training rows as they stand, one per branch: what a mask made by hand speaks of."""
    require_admin(request)
    found = service_of(request).log.reader.read_trajectory(rollout_id, attempt_of(request))
    rows_now = [row_json(row) for row in rows_of_open(found)]
    return Response(dumps({"rows": rows_now}), media_type="application/json")


@sessions.get("/v1/sessions/{rollout_id}/conversation")
async def conversation(request: Request, rollout_id: str) -> Response:
    """A session's branches in messages, oldest first."""
    require_admin(request)
    found = service_of(request).log.reader.read_trajectory(rollout_id, attempt_of(request))
    return Response(dumps(branches(found)), media_type="application/json")
