"""A mock engine: answers after a fixed time with one of a few prepared replies, for next to no CPU.

In: SGLang's /generate with ids, for Palestra; OpenAI's /v1/chat/completions as vLLM serves it to a recorder (ids and logprobs in the
reply), for the peers. Out: REPLY tokens with ids and logprobs. `POST /bench {"latency_s": X}` sets the time that an answer takes, and
`GET /bench` says how many were given. Nothing else is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.gateway_http import listen, raise_file_limit, response
from benchmarks.gateway_texts import FIRST, GROWTH, REPLY, Texts

MODEL = "bench"
VOCAB = 49_152


class Mock:
    """The engine's answers."""

    def __init__(self, texts: Texts) -> None:
        self._dice = random.Random(3)
        self._texts = texts
        self.latency_s = 0.05
        self.given = 0
        self._native = itertools.cycle(
            [
                response(orjson.dumps(self._generated(ids, text)))
                for ids, text in zip(texts.ids, texts.replies, strict=True)
            ]
        )
        self._prompt = [self._dice.randrange(3, VOCAB) for _ in range(FIRST + 128 * GROWTH)]
        self._by_turn: dict[int, bytes] = {}

    def handle(self, path: bytes, body: bytes, send: Callable[[bytes], None]) -> None:
        """Answers one request."""
        if path == b"/generate":
            # The service's own probe at its start wants fewer tokens than the benchmark's calls.
            short = b'"max_new_tokens":4,' in body[-400:]
            self._later(self._short() if short else next(self._native), send)
        elif path.endswith(b"/chat/completions"):
            self._later(self._chat(body), send)
        elif path == b"/bench":
            if body:
                self.latency_s = float(orjson.loads(body)["latency_s"])
            send(response(orjson.dumps({"given": self.given})))
        elif path.endswith(b"/models"):
            send(response(orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})))
        else:
            send(response(orjson.dumps({"status": "ok", "model_path": MODEL, "vocab_size": VOCAB})))

    def _later(self, raw: bytes, send: Callable[[bytes], None]) -> None:
        self.given += 1
        if self.latency_s:
            asyncio.get_running_loop().call_later(self.latency_s, send, raw)
        else:
            send(raw)

    def _logprobs(self, n: int) -> list[float]:
        return [-self._dice.expovariate(1.5) for _ in range(n)]

    def _generated(self, ids: tuple[int, ...], text: str) -> dict[str, Any]:
        """As SGLang words it."""
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": "0" * 32,
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": FIRST,
                "weight_version": "default",
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "e2e_latency": self.latency_s,
                "output_token_logprobs": list(zip(self._logprobs(len(ids)), ids, [None] * len(ids), strict=True)),
            },
        }

    def _short(self) -> bytes:
        return response(orjson.dumps(self._generated(self._texts.ids[0][-4:], "")))

    def _chat(self, body: bytes) -> bytes:
        """The reply to turn N, told by its number of messages: prompt ids grow as a template would make them grow, so that recorders which
        link turns by token prefix find them linked."""
        turn = body.count(b'"role"') // 2 - 1
        if (raw := self._by_turn.get(turn)) is None:
            raw = self._by_turn[turn] = response(json.dumps(self._completion(turn)).encode())
        return raw

    def _completion(self, turn: int) -> dict[str, Any]:
        """As vLLM words it with return_token_ids and --return-tokens-as-token-ids."""
        size = FIRST + GROWTH * turn
        ids = self._prompt[size : size + REPLY]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, self._logprobs(REPLY), strict=True)
        ]
        message = {"role": "assistant", "content": self._texts.replies[turn % len(self._texts.replies)]}
        choice = {"index": 0, "message": message, "logprobs": {"content": content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": size, "completion_tokens": REPLY, "total_tokens": size + REPLY}
        return {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{**choice, "token_ids": ids, "stop_reason": None}],
            "usage": usage,
            "prompt_token_ids": self._prompt[:size],
        }


def run(texts: Path, on_ready: Callable[[str], None]) -> None:
    """Serves until the process ends; `on_ready` is told the URL."""
    raise_file_limit()

    async def main() -> None:
        server, url = await listen(Mock(Texts.load(texts)).handle)
        on_ready(url)
        await server.serve_forever()

    uvloop.run(main())
