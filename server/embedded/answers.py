"""Bodies in and answers out, for all paths of the HTTP surface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import orjson
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import ValidationError

from palestra.server.embedded import wire
from palestra.server.embedded.types import EmbeddedError, RequestRefused

Body = TypeVar("Body", bound=wire.Wire)
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


async def read(request: Request, kind: type[Body]) -> Body:
    """The body, checked; none at all is {}.

    Raises:
        RequestRefused: it is not of this kind.
    """
    raw = await request.body()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as fault:
        raise RequestRefused(wire.explain(fault)) from fault


def answer(content: object, status: int = 200) -> Response:
    """JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def refuse(_: Request, fault: Exception) -> Response:
    """The answer of an `EmbeddedError`, with the status of its kind."""
    status = fault.status if isinstance(fault, EmbeddedError) else EmbeddedError.status
    return answer({"success": False, "message": str(fault), "error": {"message": str(fault)}}, status)
