"""A model route: from bytes on a connection to bytes on it, for any dialect. A plain ASGI application, since these are the hot routes.

In: a request with a session's key. Out: JSON, or server-sent events once the reply is durable. It waits for the body (bounded in size and
time), for the call's reply (never longer than the caller said that it waits), and for the caller to read it. A caller that is gone is
noticed at once; its call goes on for a while, in case it comes back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import orjson

from palestra.server.gateway.calls import Call, CallDesk
from palestra.server.gateway.session import Session, SessionTable
from palestra.server.gateway.turns import TurnCore
from palestra.server.gateway.types import Dialect, ModelCall, ModelReply, status_of
from palestra.server.types import ServerError, SessionError

MAX_BODY = 32 << 20
"""Bytes of a request."""
BODY_S = 60.0
"""How long a request's body may take, seconds."""
SEND_S = 120.0
"""How long a caller may take to read a piece of a reply."""
PING_S = 10.0
"""A stream says that it lives this often while the model works."""
MARGIN_S = 1.0
"""How long before its caller gives up a call is answered with `still_generating`: it comes back and finds its own call."""
PIECE = 16 << 10
_PREFIX = re.compile(r"(?:[a-z]+[_-])?")
"""What a dialect puts before a reply's id."""
Scope = Mapping[str, Any]


class Gone(Exception):
    """The caller closed its connection."""


class ModelEndpoint:
    """Serves one dialect for all sessions."""

    def __init__(self, dialect: Dialect, sessions: SessionTable, desk: CallDesk, core: TurnCore) -> None:
        self.dialect, self.sessions, self.desk, self.core = dialect, sessions, desk, core

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """ASGI."""
        try:
            try:
                headers = _headers(scope)
                session = find_session(self.sessions, scope, headers)
                body = await read_body(receive, headers)
                call = self.dialect.read(body, lambda reply_id: recall(session, reply_id))
                await self._answer(session, call, body, headers, receive, send)
            except ServerError as error:
                await self._refuse(error, send)
        except Gone:
            return

    async def _answer(
        self, session: Session, asked: ModelCall, body: bytes, headers: Mapping[bytes, bytes], receive: Any, send: Any
    ) -> None:
        name = headers.get(b"x-request-id") or headers.get(b"idempotency-key")
        retried = headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")
        call = self.desk.join(session, asked, body, None if name is None else name.decode("latin-1"), retried)
        sent, fault = False, None
        try:
            if asked.stream:
                fault = await self._stream(call, asked, receive, send)
            else:
                reply = await self._wait(call, receive, _patience(headers))
                raw = orjson.dumps(self.dialect.reply(asked, reply))
                await write(send, 200, b"application/json", raw)
            sent = True
        except ServerError as error:
            fault = error
            raise
        finally:
            if sent or fault is not None:
                session.fault = str(fault) if fault is not None and status_of(fault)[0] >= 500 else None
            if sent:
                await self.core.mark(session, self.desk.sent(call), True)
            else:
                await self.core.mark(session, self.desk.leave(session, call), False)

    async def _wait(self, call: Call, receive: Any, patience_s: float | None) -> ModelReply:
        """The reply, or `still_generating` shortly before the caller would give up."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((call.task, gone), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if gone.done():
            raise Gone
        if call.task.done():
            return call.task.result()
        raise SessionError(
            "the model still works on this call; repeat the request to get its reply", 503, "still_generating"
        )

    async def _stream(self, call: Call, asked: ModelCall, receive: Any, send: Any) -> ServerError | None:
        """The reply as events; returns the error that ended a stream which had begun."""
        gone = asyncio.ensure_future(_disconnected(receive))
        begun, fault = False, None
        try:
            while not call.task.done():
                await asyncio.wait((call.task, gone), timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise Gone
                if not call.task.done():
                    await _push(send, begun, self.dialect.ping)
                    begun = True
            try:
                reply = call.task.result()
            except ServerError as error:
                if not begun:
                    raise
                fault = error
                await _push(send, True, self.dialect.error_event(error, status_of(error)[0]))
            else:
                begun = await self._replay(asked, reply, gone, send, begun)
            await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            return fault
        finally:
            gone.cancel()

    async def _replay(self, asked: ModelCall, reply: ModelReply, gone: Any, send: Any, begun: bool) -> bool:
        """The finished reply as events, in pieces that fill a packet."""
        held: list[bytes] = []
        size = 0
        for event in self.dialect.events(asked, reply):
            held.append(event)
            size += len(event)
            if size >= PIECE:
                if gone.done():
                    raise Gone
                await _push(send, begun, b"".join(held))
                begun, size = True, 0
                held.clear()
        if gone.done():
            raise Gone
        await _push(send, begun, b"".join(held))
        return True

    async def _refuse(self, error: ServerError, send: Any) -> None:
        status, code = status_of(error)
        raw = orjson.dumps(self.dialect.error(error, status))
        extra = [(b"x-should-retry", b"true"), (b"retry-after-ms", b"10")] if code == "still_generating" else []
        await write(send, status, b"application/json", raw, extra)


def find_session(sessions: SessionTable, scope: Scope, headers: Mapping[bytes, bytes]) -> Session:
    """The session that a request speaks for: by the path, by `X-Session-Id`, or by its key.

    Raises:
        SessionError: 401.
    """
    key = key_of(headers)
    part = scope.get("path_params", {}).get("part")
    if part is None and (header := headers.get(b"x-session-id")) is not None:
        part = header.decode("latin-1")
    return sessions.by_key(key) if part is None else sessions.named(part, key)


def key_of(headers: Mapping[bytes, bytes]) -> str | None:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY`."""
    header = headers.get(b"authorization", b"")
    if header[:7].lower() == b"bearer ":
        return header[7:].strip().decode("latin-1")
    found = headers.get(b"x-api-key")
    return None if found is None else found.decode("latin-1")


def recall(session: Session, reply_id: str) -> list[Mapping[str, Any]]:
    """The conversation up to and with a reply of this session.

    Raises:
        SessionError: 404.
    """
    head, _, tail = reply_id.rpartition("-")
    record = session.record
    # Every session counts its turns from 0: the index alone would find a turn of this session under the id of another one's.
    mine = f"{record.rollout_id}-{record.attempt}"
    known = head.endswith(mine) and _PREFIX.fullmatch(head[: -len(mine)]) is not None
    # Longer digit strings than an index can be are no id of ours, and would be costly to read.
    node = session.tree.find(int(tail)) if known and tail.isascii() and tail.isdigit() and len(tail) < 10 else None
    if node is None:
        raise SessionError(f"no reply {reply_id[:100]!r} in this session", 404, "not_found")
    return node.conversation()


async def read_body(receive: Any, headers: Mapping[bytes, bytes], max_bytes: int | None = None) -> bytes:
    """The whole body, of at most `max_bytes`; None: MAX_BODY.

    Raises:
        SessionError: 408, 413 or 415.
        Gone: the caller left.
    """
    max_bytes = MAX_BODY if max_bytes is None else max_bytes
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise SessionError("a compressed body is not understood; send it as it is", 415, "unsupported_encoding")
    if int(length) > max_bytes if (length := headers.get(b"content-length", b"")).isdigit() else False:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_S):
            return await _pieces(receive, max_bytes)
    except TimeoutError:
        raise SessionError(f"the body did not come within {BODY_S:.0f} s", 408, "body_timeout") from None


async def _pieces(receive: Any, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(max_bytes: int) -> SessionError:
    return SessionError(f"the body is larger than {max_bytes >> 20} MiB", 413, "body_too_large")


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _patience(headers: Mapping[bytes, bytes]) -> float | None:
    """How long the caller waits for an answer, less a margin, where it says so: the official clients do."""
    try:
        said = float(headers.get(b"x-stainless-read-timeout", b"") or headers.get(b"x-palestra-timeout", b""))
    except ValueError:
        return None
    if not 0 < said < 86_400:
        return None
    return said - min(MARGIN_S, said / 4)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _push(send: Any, begun: bool, data: bytes) -> None:
    """A piece of a stream, with the head before the first."""
    if not begun:
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await _send(send, {"type": "http.response.start", "status": 200, "headers": head})
    await _send(send, {"type": "http.response.body", "body": data, "more_body": True})


async def write(
    send: Any, status: int, kind: bytes, raw: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    """A whole response."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(raw)), *(extra or ())]
    await _send(
        send,
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": raw},
    )


async def _send(send: Any, *messages: Mapping[str, Any]) -> None:
    """Raises:
    Gone: the caller reads no more.
    """
    try:
        async with asyncio.timeout(SEND_S):
            for message in messages:
                await send(message)
    except (TimeoutError, OSError):
        raise Gone from None
