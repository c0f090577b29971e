"""The routes of a publish, for trainers: thin functions from a request to the publisher and back. All need the admin token."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import Response

from palestra.server.publishing import bodies
from palestra.server.routes import Framed, body_as, reply, require_admin, service_of

publishing = APIRouter(prefix="/admin/publish")


@publishing.get("/target")
async def target(request: Request) -> Response:
    """Which engines would get weights: their kind, device, URLs and ranks."""
    require_admin(request)
    return reply(asdict(await service_of(request).publisher.target()))


@publishing.post("/begin")
async def begin(request: Request) -> Response:
    """Puts a version on record; says which engines take part."""
    require_admin(request)
    body = await body_as(request, bodies.BeginBody)
    return reply(asdict(await service_of(request).publisher.begin(body.version, body.train_step, body.transport)))


@publishing.post("/hold")
async def hold(request: Request) -> Response:
    """Has the engines stand still, as the update mode says."""
    require_admin(request)
    body = await body_as(request, bodies.VersionBody)
    await service_of(request).publisher.hold(body.version)
    return reply({"ok": True})


@publishing.post("/bucket", openapi_extra={"requestBody": {"content": {Framed.media_type: {}}}})
async def bucket(request: Request) -> Response:
    """A part of the weights by value, a safetensors blob, for embedded engines."""
    require_admin(request)
    await service_of(request).publisher.bucket(await request.body())
    return reply({"ok": True})


@publishing.post("/handles")
async def handles(request: Request) -> Response:
    """A bucket in memory that trainer and engines share."""
    require_admin(request)
    await service_of(request).publisher.handles(await body_as(request, bodies.HandlesBody))
    return reply({"ok": True})


@publishing.post("/join")
async def join(request: Request) -> Response:
    """Has the engines join the trainer's process group; answers early where one fails."""
    require_admin(request)
    return reply({"failed": await service_of(request).publisher.join(await body_as(request, bodies.JoinBody))})


@publishing.post("/announce")
async def announce(request: Request) -> Response:
    """Names the tensors of a bucket that is being broadcast; answers early where an engine fails."""
    require_admin(request)
    return reply({"failed": await service_of(request).publisher.announce(await body_as(request, bodies.AnnounceBody))})


@publishing.post("/leave")
async def leave(request: Request) -> Response:
    """The trainer left its group: engines are freed from it; says which are left."""
    require_admin(request)
    body = await body_as(request, bodies.LeaveBody)
    return reply(asdict(await service_of(request).publisher.leave(body.group)))


@publishing.post("/end")
async def end(request: Request) -> Response:
    """Puts the new weights in force; says how long the engines stood still and who was left out."""
    require_admin(request)
    return reply(asdict(await service_of(request).publish_end(await body_as(request, bodies.EndBody))))


@publishing.post("/cancel")
async def cancel(request: Request) -> Response:
    """Gives a publish up; engines go on."""
    require_admin(request)
    body = await body_as(request, bodies.VersionBody)
    await service_of(request).publisher.cancel(body.version)
    return reply({"ok": True})


@publishing.post("/canary")
async def canary(request: Request) -> Response:
    """Compares logprobs of a short text between trainer and engines."""
    require_admin(request)
    return reply({"gaps": await service_of(request).publisher.canary(await body_as(request, bodies.CanaryBody))})
