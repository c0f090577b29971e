"""The service's HTTP routes: thin functions from a request to `RolloutService` and back. No logic lives here.

Two keys: a session key opens one session's model routes; the admin token opens the control routes.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import orjson
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from palestra.agents.types import Verdict
from palestra.server import control_bodies as bodies
from palestra.server.control_bodies import Body, decode_body
from palestra.server.gateway.dialects.reading import check_messages, check_tools
from palestra.server.gateway.endpoint import key_of, read_body
from palestra.server.gateway.types import status_of
from palestra.server.plan.types import WorkerFacts
from palestra.server.service import RolloutService
from palestra.server.types import SampleError, ServerError, SessionError, StoreError
from palestra.server.wire.codec import decode_group, encode_group, join_blobs, split_blobs

control = APIRouter()
MAX_GROUPS = 1 << 30
"""Bytes of groups that one call may bring."""
MAX_WAIT_S = 60.0
"""How long one call waits for work or groups; its caller asks again."""


class Framed(Response):
    """Bytes that are no text."""

    media_type = "application/octet-stream"


def service_of(request: Request) -> RolloutService:
    """The service behind the app."""
    service: RolloutService = request.app.state.service
    return service


def reply(value: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def require_admin(request: Request) -> None:
    """Raises:
    SessionError: 401 without the admin token.
    """
    token: str = request.app.state.admin_token
    if not token or not hmac.compare_digest((key_of(dict(request.headers.raw)) or "").encode(), token.encode()):
        raise SessionError("this route needs the admin token", 401, "invalid_api_key")


async def body_as(request: Request, kind: type[Body]) -> Body:
    """The body of a control call; an empty one is `{}`.

    Raises:
        SessionError: 400 with the place of what is wrong.
    """
    return decode_body(await read_body(request.receive, dict(request.headers.raw)), kind)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    name = service_of(request).settings.model
    return reply({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "palestra"}]})


@control.get("/health")
async def health(request: Request) -> Response:
    """Answers once the service takes calls."""
    return reply({"status": "ok"})


@control.get("/status")
async def status(request: Request) -> Response:
    """What goes on, and who waits for whom."""
    return reply(await service_of(request).status())


@control.post("/admin/worker")
async def register_worker(request: Request) -> Response:
    """A worker says what its environment and its program are like."""
    require_admin(request)
    body = await body_as(request, bodies.WorkerBody)
    facts = WorkerFacts(body.tasks, body.weights, body.reviews, body.deterministic)
    try:
        service_of(request).plan.register(facts)
    except ValueError as error:
        raise SessionError(str(error)) from error
    return reply({"ok": True})


@control.post("/admin/work")
async def work(request: Request) -> Response:
    """The next work (`kind`: play or review), or null when none came within `wait_s`."""
    require_admin(request)
    body = await body_as(request, bodies.WorkBody)
    work = await service_of(request).work(min(body.wait_s, MAX_WAIT_S), reviews_only=body.reviews_only)
    return reply(None if work is None else work.as_dict())


@control.post("/admin/skip")
async def skip(request: Request) -> Response:
    """A task that is not to be played."""
    require_admin(request)
    body = await body_as(request, bodies.SkipBody)
    await service_of(request).judge(body.group_id, Verdict(keep=False, reason=body.reason))
    return reply({"ok": True})


@control.post("/admin/verdict")
async def verdict(request: Request) -> Response:
    """What the run's own program says of a group; can be repeated."""
    require_admin(request)
    body = await body_as(request, bodies.VerdictBody)
    await service_of(request).judge(body.group_id, Verdict(body.keep, body.reason, body.rewards))
    return reply({"ok": True})


@control.post("/admin/claim", response_class=Framed)
async def claim(request: Request) -> Response:
    """n groups in the buffer's own encoding, each behind its length (little-endian u32); empty when they did not come in time."""
    require_admin(request)
    body = await body_as(request, bodies.ClaimBody)
    groups = await service_of(request).claim(
        body.n, body.owner, body.ttl_s, min(body.wait_s, MAX_WAIT_S), body.claim_id
    )
    framed = join_blobs([encode_group(group) for group in groups])
    return Framed(framed)


@control.post("/admin/put")
async def put(request: Request) -> Response:
    """Groups in the buffer's own encoding, each behind its length: rows made by hand of sessions on record. Refused where they say anything
    else of a token than the record does; a group that is there already is left alone."""
    require_admin(request)
    raw = await read_body(request.receive, dict(request.headers.raw), MAX_GROUPS)
    try:
        groups = [decode_group(blob) for blob in split_blobs(raw)]
    except (StoreError, SampleError) as error:
        raise SessionError(f"body: {error}", 400, "groups_refused") from error
    return reply({"count": await service_of(request).put(groups)})


@control.post("/admin/lease")
async def lease(request: Request) -> Response:
    """Renews or releases leases."""
    require_admin(request)
    body, service = await body_as(request, bodies.LeaseBody), service_of(request)
    if body.release:
        count = await asyncio.to_thread(service.buffer.release, body.group_ids, body.owner)
        service.signal.notify()
    elif body.ttl_s is None:
        raise SessionError("ttl_s must be given to renew leases")
    else:
        count = await asyncio.to_thread(service.buffer.renew, body.group_ids, body.owner, body.ttl_s)
    return reply({"count": count})


@control.post("/admin/commit")
async def commit(request: Request) -> Response:
    """Marks groups as trained, all or none."""
    require_admin(request)
    body = await body_as(request, bodies.CommitBody)
    count = await service_of(request).commit(body.step, body.checkpoint_id, body.group_ids, body.owner)
    return reply({"count": count})


@control.post("/admin/collect")
async def collect(request: Request) -> Response:
    """Deletes what no kept checkpoint can need."""
    require_admin(request)
    body = await body_as(request, bodies.CollectBody)
    return reply({"deleted": await asyncio.to_thread(service_of(request).buffer.collect, body.oldest_train_step)})


@control.post("/admin/restore")
async def restore(request: Request) -> Response:
    """A trainer starts from a checkpoint."""
    require_admin(request)
    body = await body_as(request, bodies.RestoreBody)
    version = await service_of(request).restore(body.train_step, body.policy_version)
    return reply({"next_version": version})


@control.post("/admin/freeze")
async def freeze(request: Request) -> Response:
    """Takes all requests off the engines until /admin/thaw; callers wait."""
    require_admin(request)
    await service_of(request).engine.freeze()
    return reply({"ok": True})


@control.post("/admin/thaw")
async def thaw(request: Request) -> Response:
    """Lets them go on."""
    require_admin(request)
    service_of(request).engine.thaw()
    return reply({"ok": True})


@control.post("/admin/render")
async def render(request: Request) -> Response:
    """Transcripts as supervised rows."""
    require_admin(request)
    service, body = service_of(request), await body_as(request, bodies.RenderBody)
    for transcript in body.transcripts:
        check_messages(transcript.messages)
        check_tools(transcript.tools or ())
    rows = [service.renderer.transcript(said.messages, said.tools or ()) for said in body.transcripts]
    return reply([{"token_ids": row.token_ids, "loss_mask": row.loss_mask} for row in rows])


@control.get("/admin/metrics")
async def metrics(request: Request) -> Response:
    """Rollout-side figures since the last call."""
    require_admin(request)
    return reply(await service_of(request).step_metrics())


@control.get("/admin/ledger")
async def ledger(request: Request) -> Response:
    """Where every sampled token went."""
    require_admin(request)
    return reply(await service_of(request).ledger())


async def on_error(request: Request, error: Exception) -> Response:
    """Every error of ours as OpenAI's clients read it; the status says whose fault it is."""
    status, code = status_of(error) if isinstance(error, ServerError) else (500, "internal_error")
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
    return reply({"error": {"message": said, "type": kind, "code": code, "param": None}}, status)


async def on_gone(request: Request, error: Exception) -> Response:
    """The caller left before its request was whole: nobody reads this."""
    return Response(status_code=499)


async def on_http_error(request: Request, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException), "registered for these alone"
    said = f"{error.detail}: {request.method} {request.url.path}"
    body = {"error": {"message": said, "type": "invalid_request_error", "code": "not_found", "param": None}}
    return Response(orjson.dumps(body), error.status_code, dict(error.headers or {}), "application/json")
