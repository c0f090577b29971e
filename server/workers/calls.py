"""Control calls: small JSON requests to engines and routers, apart from the token traffic.

In: a URL, a body, a time limit. Out: the answer, or one line of what went wrong as an `EngineError`. Each call has a connection of its own:
an engine that closed an idle one would otherwise look like an engine that died. Every wait is bounded by the caller's `timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from palestra.server.types import EngineError, EngineRefused
from palestra.server.workers.types import WorkerDown, WorkerSilent

REPEAT_S = 0.2
"""Before a call whose connection was refused is made once more: a listener whose queue is full refuses too."""


class Calls:
    """Opened on the running loop, closed after the last call."""

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        """`tokens`: beginning of a URL -> bearer token of calls that go there."""
        self._http: aiohttp.ClientSession | None = None
        self._tokens = {f"{begins.rstrip('/')}/": token for begins, token in (tokens or {}).items()}

    async def open(self) -> None:
        """Makes the session."""
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Ends it; calls under way fail."""
        if self._http is not None:
            await self._http.close()

    async def post(self, url: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a POST; one that is no JSON object is {"text": ...} or {"value": ...}.

        Raises:
            WorkerDown: nobody listens there, or the connection broke.
            WorkerSilent: no answer within `timeout_s` seconds.
            EngineRefused: a status of the 400 class.
            EngineError: another status.
        """
        return _json(await self._call("POST", url, orjson.dumps(payload), timeout_s))

    async def post_raw(self, url: str, body: bytes, timeout_s: float) -> bytes:
        """As `post`, for a body and an answer as they are on the wire."""
        return await self._call("POST", url, body, timeout_s)

    async def get(self, url: str, timeout_s: float) -> dict[str, Any]:
        """As `post`, for a GET."""
        return _json(await self._call("GET", url, None, timeout_s))

    async def text(self, url: str, timeout_s: float) -> str:
        """As `get`, for an answer that is text."""
        return (await self._call("GET", url, None, timeout_s)).decode(errors="replace")

    async def delete(self, url: str, timeout_s: float) -> dict[str, Any]:
        """As `post`, for a DELETE."""
        return _json(await self._call("DELETE", url, None, timeout_s))

    async def _call(self, method: str, url: str, body: bytes | None, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._once(method, url, body)
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(REPEAT_S)
                    return await self._once(method, url, body)
        except aiohttp.ClientConnectorError as error:
            raise WorkerDown(f"{url}: no connection: {error.os_error.strerror or error}") from None
        except TimeoutError:
            raise WorkerSilent(f"{url}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerDown(f"{url}: the connection broke: {type(error).__name__}: {error}") from None

    async def _once(self, method: str, url: str, body: bytes | None) -> bytes:
        if self._http is None:
            raise EngineError("the engine client is not open")
        headers = {} if body is None else {"Content-Type": "application/json"}
        for begins, token in self._tokens.items():
            if url.startswith(begins):
                headers["Authorization"] = f"Bearer {token}"
        async with self._http.request(method, url, data=body, headers=headers) as reply:
            raw = await reply.read()
            if 200 <= reply.status < 300:
                return raw
            kind = EngineRefused if 400 <= reply.status < 500 else EngineError
            raise kind(f"{url}: HTTP {reply.status}: {raw[:500].decode(errors='replace')}")


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError:
        return {"text": raw[:200].decode(errors="replace")}
    return value if isinstance(value, dict) else {"value": value}
