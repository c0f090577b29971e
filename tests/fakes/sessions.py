"""A session host without an engine: sessions in memory, and an OpenAI chat endpoint on loopback whose replies a test writes.

Both URLs of a session work, with streaming and without. A conversation is kept per session, a branch for each request that continues none.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from palestra.agents.transcript import text_of
from palestra.agents.types import GroupAssignment, SessionHandle
from palestra.envs.types import Episode, Message

Script = Callable[[str, Sequence[Message]], Any]
"""(key, messages) -> the assistant message, or (status, error body)."""


def failure(code: str | None, message: str = "no", param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": code, "param": param}}


@dataclass
class FakeSessions:
    """A `SessionHost` in memory. Keys are `key-INDEX`."""

    script: Script = lambda key, messages: {"role": "assistant", "content": "42"}
    base: str = "http://127.0.0.1:9"
    branches: dict[str, list[list[Message]]] = field(default_factory=dict)
    closed: dict[str, Episode] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(path, body)"""
    events: list[tuple[str, str]] = field(default_factory=list)
    """(what, key), in order."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, index: int = 0, group: str = "g") -> SessionHandle:
        key = f"key-{index}"
        return SessionHandle(f"{group}-{index}", 0, f"{self.base}/v1", key, f"{self.base}/sessions/{key}/v1")

    def open_session(self, assignment: GroupAssignment, index: int, task_id: str) -> SessionHandle:
        handle = self.handle(index, assignment.group_id)
        with self.lock:
            self.events.append(("open", handle.api_key))
        return handle

    def close_session(self, handle: SessionHandle, episode: Episode) -> None:
        with self.lock:
            assert handle.api_key not in self.closed, "closed twice"
            self.closed[handle.api_key] = episode
            self.events.append(("close", handle.api_key))

    def conversation(self, handle: SessionHandle) -> list[list[Message]]:
        with self.lock:
            return [list(branch) for branch in self.branches.get(handle.api_key, [])]

    def say(self, key: str, messages: Sequence[Message]) -> Any:
        """One model call: the reply, kept as a turn; or what the script gives instead of one."""
        reply = self.script(key, messages)
        if isinstance(reply, dict):
            with self.lock:
                self._keep(self.branches.setdefault(key, []), list(messages), reply)
                self.events.append(("reply", key))
        return reply

    def _keep(self, branches: list[list[Message]], messages: list[Message], reply: Message) -> None:
        asked = [(m.get("role"), text_of(m)) for m in messages]
        for branch in branches:
            if [(m.get("role"), text_of(m)) for m in branch] == asked[: len(branch)]:
                branch += [*messages[len(branch) :], reply]
                return
        branches.append([*messages, reply])


async def _answer(host: FakeSessions, request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    key = request.match_info.get("key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
    host.requests.append((request.path, body))
    reply = await asyncio.to_thread(host.say, key, body["messages"])
    if isinstance(reply, tuple):
        return web.json_response(reply[1], status=reply[0])
    finish = "tool_calls" if reply.get("tool_calls") else "stop"
    whole = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "policy"}
    if not body.get("stream"):
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": reply, "finish_reason": finish}
        return web.json_response({**whole, "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for delta, reason in [*((d, None) for d in _deltas(reply)), ({}, finish)]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {**whole, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _deltas(reply: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    text = text_of(reply)
    for at in range(0, len(text), 3):
        yield {"content": text[at : at + 3]}
    for index, call in enumerate(reply.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": function}]}
        for at in range(0, len(arguments), 5):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 5]}}]}


@contextmanager
def listening(host: FakeSessions) -> Iterator[FakeSessions]:
    """Serves `host` on a loopback port; sets its `base`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def chat(request: web.Request) -> web.StreamResponse:
        return await _answer(host, request)

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_post("/sessions/{key}/v1/chat/completions", chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield host
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
