"""The `/retrieve` listener, in search-r1's form (see `palestra.envs.search.http`), with and without scores.

In: JSON bodies, bounded in size and in the number of queries. Out: hits as JSON, or an error that says what to change. Searches run in
threads of their own, so a slow one holds up no other request; it waits for them, and for SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.envs.search.http import hit_to_json
from palestra.envs.search.types import MOST_HITS, Hit, Retriever, RetrieverError
from palestra.server.ready import config_of, serve_until_told

MOST_BODY = 4 << 20
"""Bytes of a request."""
MOST_QUERIES = 1_024
"""Of one request."""
USUAL_K = 3
"""Hits per query where a request names no number, as in search-r1."""


class _Refusal(Exception):
    """A request that is not served; `status` says why to machines, the text to people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    queries: tuple[str, ...]
    k: int
    scored: bool
    """Whether scores are wanted."""


def build_app(retriever: Retriever, about: dict[str, Any], threads: int | None = None) -> Starlette:
    """The application.

    Args:
        about: what `/health` tells people: which retriever, which corpus.
        threads: searches at a time; two per core where none is named.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with ThreadPoolExecutor(threads or 2 * (os.cpu_count() or 1), "search") as pool:
            app.state.pool = pool
            yield

    routes = [Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health, methods=["GET"])]
    handlers: Any = {_Refusal: _on_refusal, RetrieverError: _on_fault, ClientDisconnect: _on_gone, Exception: _on_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.state.retriever, app.state.about = retriever, about
    return app


async def retrieve(request: Request) -> Response:
    """A list of hits per query."""
    asked = read_asked(await _body(request))
    loop = asyncio.get_running_loop()
    retriever: Retriever = request.app.state.retriever
    found = await asyncio.gather(
        *(loop.run_in_executor(request.app.state.pool, _search, retriever, query, asked.k) for query in asked.queries)
    )
    return _json({"result": [[hit_to_json(hit, asked.scored) for hit in hits] for hits in found]})


async def health(request: Request) -> Response:
    """That it answers, and what it searches."""
    return _json({"status": "ok", **request.app.state.about})


def read_asked(body: bytes) -> Asked:
    """A request's body, checked.

    Raises:
        _Refusal: says which key is wrong.
    """
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refusal(422, f"the body is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise _Refusal(422, "the body is a JSON object with a list of texts under 'queries'")
    queries, k, scored = said.get("queries"), said.get("topk"), said.get("return_scores", False)
    # A text is a sequence too: taken letter by letter it would search for each of them.
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Refusal(422, "'queries' must be a list of texts")
    if len(queries) > MOST_QUERIES:
        raise _Refusal(422, f"'queries' are {len(queries)}, at most {MOST_QUERIES} in one request")
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_HITS):
        raise _Refusal(422, f"'topk' must be null or a whole number from 1 to {MOST_HITS}")
    if not isinstance(scored, bool):
        raise _Refusal(422, "'return_scores' must be true or false")
    return Asked(tuple(queries), USUAL_K if k is None else k, scored)


def _search(retriever: Retriever, query: str, k: int) -> list[Hit]:
    return retriever.search(query, k)


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > MOST_BODY:
            raise _Refusal(413, f"a body of more than {MOST_BODY} bytes")
    return bytes(found)


async def _on_refusal(request: Request, error: Exception) -> Response:
    return _json({"detail": str(error)}, error.status if isinstance(error, _Refusal) else 422)


async def _on_fault(request: Request, error: Exception) -> Response:
    """The retriever could not search."""
    return _json({"detail": str(error)}, 503)


async def _on_gone(request: Request, error: Exception) -> Response:
    """The caller left before its request was whole: nobody reads this."""
    return Response(status_code=499)


async def _on_error(request: Request, error: Exception) -> Response:
    """A fault of ours."""
    return _json({"detail": f"{type(error).__name__}: {error}"}, 500)


def _json(said: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(said), status, media_type="application/json")


async def serve(app: Starlette, sock: socket.socket, on_ready: Callable[[], None]) -> bool:
    """Serves until SIGTERM or SIGINT; `on_ready` is called once it answers. False where it did not start (the cause is in the log)."""
    return await serve_until_told(config_of(app, grace_s=10), sock, on_ready)
