"""A session at an OpenEnv server, over its WebSocket: `/reset` and `/step` over plain HTTP make a new environment for each request there.

A message goes out, its answer comes back. The connection lives on the process's loop thread, where a task reads it all the time: pings are
answered also while nobody asks anything. Callers wait in their own threads, at most `timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from palestra.envs import background
from palestra.envs.types import EnvError

if TYPE_CHECKING:
    import aiohttp

MOST_BYTES = 64 << 20
"""Longest answer."""
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class ServerSaidNoError(EnvError):
    """An error that the server answered with; `code` is its word for it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def session_url(url: str) -> str:
    """Where an OpenEnv server has its sessions.

    Raises:
        ValueError: it is no URL of a server.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"url must be http(s):// or ws(s)://, got {url!r}")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


class Connection:
    """One session; it is opened by the first question, and anew after a fault. For one thread at a time."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 60.0) -> None:
        """
        Raises:
            ValueError: `url` is none, or `timeout_s` no time.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        self.url, self._timeout_s = session_url(url), timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._live: _Live | None = None

    def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a message; the data of its answer.

        Raises:
            ServerSaidNoError: the server answered with an error.
            EnvError: it cannot be reached, is silent for too long, or says nonsense; the session is over.
        """
        text = _written({"type": kind} if data is None else {"type": kind, "data": dict(data)})
        if self._live is not None and self._live.pid != os.getpid():
            self._live = None  # the parent's: a forked child has another loop
        if kind == "reset" and self._live is not None and self._live.ended:
            self.close()  # servers end sessions that are idle, and an episode can begin in another one
        try:
            live = self._live
            if live is None:
                live = self._live = background.call(_Live.open(self.url, self._headers), self._timeout_s)
            answer = background.call(live.ask(text), self._timeout_s)
        except background.DeadlineError:
            self.close()
            raise EnvError(f"{self.url}: no answer to {kind!r} within {self._timeout_s:g} s") from None
        except OSError as error:
            self.close()
            raise EnvError(f"{self.url}: {error or type(error).__name__}") from error
        return self._read(answer, kind)

    def _read(self, answer: str, kind: str) -> dict[str, Any]:
        try:
            said = orjson.loads(answer)
            what, data = said["type"], said.get("data") or {}
            if what == "error":
                code, told = str(data.get("code")), str(data.get("message"))[:2000]
                more = f": {json.dumps(data['errors'], default=str)[:1000]}" if data.get("errors") else ""
                raise ServerSaidNoError(f"{self.url}: {told}{more} ({code})", code)
            if not isinstance(data, dict):
                raise TypeError(f"its data is a {type(data).__name__}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.close()
            raise EnvError(f"{self.url}: the answer to {kind!r} is none: {error}: {answer[:200]!r}") from error
        return data

    def close(self) -> None:
        """Ends the session. The next question opens another one."""
        live, self._live = self._live, None
        if live is not None and live.pid == os.getpid():
            background.call(live.close(), 10.0)


def _written(message: Mapping[str, Any]) -> str:
    try:
        return orjson.dumps(message).decode()
    except TypeError:  # half of a surrogate pair, which a model may write
        return json.dumps(message, default=str)


class _Live:
    """An open connection. Belongs to the loop thread."""

    def __init__(self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.pid = os.getpid()
        self._http, self._socket = http, socket
        self._answers: asyncio.Queue[str | OSError] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str]) -> _Live:
        """Connects.

        Raises:
            OSError: that is not possible.
        """
        import aiohttp

        http = aiohttp.ClientSession(headers=dict(headers), trust_env=False)
        try:
            return cls(http, await http.ws_connect(url, max_msg_size=MOST_BYTES, autoping=True))
        except BaseException as error:
            await http.close()
            if isinstance(error, aiohttp.ClientError) and not isinstance(error, OSError):
                raise ConnectionError(str(error)) from error
            raise

    @property
    def ended(self) -> bool:
        """Whether nothing more will be heard."""
        return self._reader.done()

    async def ask(self, text: str) -> str:
        """One question and its answer.

        Raises:
            OSError: the connection is over.
        """
        if self._answers.empty():  # otherwise the server has said already why it will not talk
            with contextlib.suppress(OSError):  # and here while we were about to: it stands in the queue
                await self._socket.send_str(text)
        answer = await self._answers.get()
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def _read(self) -> None:
        import aiohttp

        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            self._answers.put_nowait(message.data)
        code = self._socket.close_code
        self._answers.put_nowait(ConnectionError(f"the server ended the session (code {code})"))

    async def close(self) -> None:
        """Says goodbye and ends."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()
        await self._http.close()
