"""A model of no weights for evaluations: an OpenAI chat endpoint on loopback whose reply is a hash of the conversation and the seed.

It plays the Calculator: most calls are right, some are wrong or malformed, and so are its answers. Run as a script it serves until it is
killed, and prints its URL: python -m tests.fakes.hash_model [DELAY_S]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from palestra.agents.transcript import text_of
from palestra.envs.types import Message

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}


def draw(body: Mapping[str, Any]) -> float:
    """A number in [0, 1) that depends on roles, texts and the seed alone."""
    said = [[message.get("role"), text_of(message)] for message in body["messages"]]
    digest = hashlib.sha256(json.dumps([said, body.get("seed")]).encode()).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def reply(body: Mapping[str, Any]) -> Message:
    """What the model says."""
    share, last = draw(body), body["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": text_of(last) if share < 0.85 else "I do not know."}
    words = text_of(last).removeprefix("What is ").removesuffix("?").split()
    expression = " ".join(OPERATORS.get(word, word) for word in words)
    if share < 0.1:
        return {"role": "assistant", "content": "42"}
    if share < 0.25:
        expression += " + 1"
    arguments = json.dumps({"expression": expression}) if share < 0.9 else "{broken"
    call = {"id": f"call_{int(share * 1e9)}", "type": "function"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**call, "function": {"name": "calculator", "arguments": arguments}}],
    }


def usage(body: Mapping[str, Any]) -> dict[str, Any]:
    """Counts that depend on the conversation alone."""
    prompt = sum(len(text_of(message)) for message in body["messages"])
    return {"prompt_tokens": prompt, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": prompt // 2}}


@dataclass
class HashModel:
    """The endpoint. `before` may answer a request itself: (status, body, headers), else None."""

    delay_s: float = 0.0
    before: Callable[[Mapping[str, Any]], tuple[int, Any, dict[str, str]] | None] = lambda body: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    url: str = ""

    async def chat(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        if (answer := self.before(body)) is not None:
            return web.json_response(answer[1], status=answer[0], headers=answer[2])
        await asyncio.sleep(self.delay_s)
        message = reply(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        whole = {"id": "c-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**whole, "choices": [choice], "usage": usage(body)})

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner


@contextmanager
def serving(model: HashModel) -> Iterator[HashModel]:
    """Serves it in a thread; sets its `url`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(model.start(), loop).result(10)
    try:
        yield model
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _forever(model: HashModel) -> None:
    await model.start()
    print(model.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_forever(HashModel(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)))
