"""An engine without a model: SGLang's native HTTP surface on loopback, answered at once with ids that a seeded generator chooses.

In: requests of an `EngineClient`. Out: ids, logprobs, versions, stop texts and routed experts that are functions of the request alone, so
that thousands of calls cost little and two runs are equal. A test scripts what it needs: single answers (`then`), a way to talk (`speak`),
requests that stand still (`hold`), and aborts in the middle (`seams`). All that was asked and answered is kept in `heard`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import orjson
from aiohttp import web

from palestra.server.renderer.tokens import TokenCodec
from palestra.server.types import Turn
from tests.live import TOKEN, LiveService, settings
from tests.tiny import save_tokenizer, train_tokenizer

Speak = Callable[[random.Random, "Heard"], Sequence[int]]
"""(generator, request) -> the ids that the model would say, its end token included where it ends by itself."""
LAYERS, TOPK = 2, 2


@dataclass(eq=False)
class Heard:
    """One request of /generate, and what it was answered with."""

    rid: str
    key: str
    """Its routing key: the session's group."""
    prompt: list[int]
    params: dict[str, Any]
    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    """What was answered; empty while it runs, and for a failure."""
    reason: str = ""
    """Finish reason of the answer; "" while it runs, "gone" where the client left first."""


@dataclass(frozen=True)
class Say:
    """A scripted answer: these ids, then this finish reason. `meta` replaces fields of meta_info, whatever they do to the contract."""

    ids: Sequence[int]
    reason: str = "stop"
    version: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fail:
    """A scripted failure."""

    status: int
    text: str = "scripted"


@dataclass(frozen=True)
class Raw:
    """A scripted answer of these very bytes, with status 200."""

    body: bytes


def logprob_of(token: int, place: int) -> float:
    """The logprob of an id at a place of the whole sequence: what tests compare with."""
    return -0.01 - ((token * 31 + place * 7) % 997) / 200.0


def experts_of(length: int, parts: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Experts of a sequence of so many ids: a row for each but the last; each names its place, and how long the sequence was."""
    rows = np.zeros((length - 1, LAYERS, TOPK), np.int16)
    rows[:, 0, 0] = np.arange(length - 1)
    rows[:, 1, 1] = parts
    return rows


class FakeEngine:
    """See the module. Start it with `listening`."""

    def __init__(self, vocab_size: int, *, seed: int = 0, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`decode`: ids to text, needed for stop texts. Ids 20 and above are drawn, so that special tokens of tiny vocabularies are not."""
        self.vocab_size, self.seed, self.decode = vocab_size, seed, decode
        self.url = ""
        self.version = "default"
        self.speak: Speak = self.babble
        self.seams = 0.0
        """How likely a request is aborted after a part of its ids, as by a weight update."""
        self.stuck: Callable[[Heard], bool] = lambda heard: False
        """Requests that stand still until they are aborted, whatever `release` says."""
        self.faults = 0.0
        """How likely a request is answered with 503, as by an engine that starts again."""
        self.heard: list[Heard] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[str, Heard] = {}
        """Requests that stand still, by rid."""
        self._script: deque[Say | Fail | Raw] = deque()
        self._times: Counter[bytes] = Counter()
        self._aborted: dict[str, asyncio.Event] = {}
        self._go = asyncio.Event()
        self._go.set()
        self.loop: asyncio.AbstractEventLoop | None = None

    # What a test says.

    def then(self, *answers: Say | Fail | Raw) -> None:
        """The next requests of /generate get these answers, in the order in which they come."""
        self._script.extend(answers)

    def hold(self) -> None:
        """From now on requests stand still, until `release` or their abort."""
        self._call(self._go.clear)

    def release(self) -> None:
        """They are answered."""
        self._call(self._go.set)

    def _call(self, work: Callable[[], None]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(work)

    def babble(self, draw: random.Random, heard: Heard) -> list[int]:
        """Up to 12 ids, mostly ended by a stop id."""
        ids = [draw.randrange(20, self.vocab_size) for _ in range(draw.randrange(1, 12))]
        stops = heard.params.get("stop_token_ids") or []
        return [*ids, stops[0]] if stops and draw.random() < 0.8 else ids + ids

    # The surface.

    def app(self) -> web.Application:
        """The application with all paths."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/health", self._ok)
        for path in ("abort_request", "pause_generation", "continue_generation", "flush_cache"):
            app.router.add_post(f"/{path}", self._control)
        for path in ("begin_weight_update", "update_weights_from_disk", "update_weights_from_tensor"):
            app.router.add_post(f"/{path}", self._control)
        app.router.add_post("/end_weight_update", self._control)
        return app

    async def _ok(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _info(self, request: web.Request) -> web.Response:
        return _json({"model_path": "fake", "weight_version": self.version, "vocab_size": self.vocab_size})

    async def _control(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        self.controls.append((request.path, body))
        if request.path == "/abort_request":
            for rid, event in self._aborted.items():
                if body.get("abort_all") or rid == body.get("rid"):
                    event.set()
        elif request.path == "/pause_generation":
            self._go.clear()
            if body.get("mode", "abort") == "abort":
                for event in self._aborted.values():
                    event.set()
        elif request.path == "/continue_generation":
            self._go.set()
        elif body.get("weight_version") is not None:
            self.version = str(body["weight_version"])
        return _json({"success": True})

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        heard = Heard(
            body["rid"], request.headers.get("X-SMG-Routing-Key", ""), body["input_ids"], body["sampling_params"], body
        )
        self.heard.append(heard)
        stopped = await self._stand_still(heard)
        if not stopped and self._script:
            step = self._script.popleft()
            if isinstance(step, Fail):
                heard.reason = "failed"
                return web.Response(status=step.status, text=step.text)
            if isinstance(step, Raw):
                heard.reason = "raw"
                return web.Response(body=step.body, content_type="application/json")
            return self._answer(heard, list(step.ids), {"type": step.reason}, step.version, step.meta)
        draw = self._draw(heard.prompt)
        if draw.random() < self.faults:
            heard.reason = "failed"
            return web.Response(status=503, text="a fault of the fake")
        ids, finish = self._sample(heard, draw, stopped)
        return self._answer(heard, ids, finish, None, {})

    async def _stand_still(self, heard: Heard) -> bool:
        """Waits while requests are held. Whether the request was aborted meanwhile."""
        aborted = self._aborted[heard.rid] = asyncio.Event()
        self.running[heard.rid] = heard
        ends = [aborted] if self.stuck(heard) else [aborted, self._go]
        try:
            while not any(event.is_set() for event in ends):
                waits = [asyncio.ensure_future(event.wait()) for event in ends]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        except asyncio.CancelledError:
            heard.reason = "gone"
            raise
        finally:
            del self.running[heard.rid], self._aborted[heard.rid]
        return aborted.is_set()

    def _draw(self, prompt: list[int]) -> random.Random:
        """A generator for this prompt, another one each time that it comes."""
        raw = orjson.dumps(prompt)
        self._times[raw] += 1
        digest = hashlib.blake2b(b"%d:%d:%b" % (self.seed, self._times[raw], raw), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "little"))

    def _sample(self, heard: Heard, draw: random.Random, stopped: bool) -> tuple[list[int], dict[str, Any]]:
        ids = list(heard.body.get("forced_ids") or self.speak(draw, heard))
        ids, finish = self._end(ids, heard.params)
        if stopped or draw.random() < self.seams:
            return ids[: draw.randrange(len(ids) + 1 if stopped else len(ids))], {"type": "abort"}
        return ids, finish

    def _end(self, ids: list[int], params: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Where a real engine would have stopped: the first stop id, the token that completes a stop text, or the bound."""
        stop_ids, texts, most = (
            set(params.get("stop_token_ids") or ()),
            params.get("stop") or (),
            params["max_new_tokens"],
        )
        for at, token in enumerate(ids[:most]):
            text = self.decode(ids[: at + 1]) if texts and self.decode is not None else ""
            if (met := next((stop for stop in texts if stop in text), None)) is not None:
                return ids[: at + 1], {"type": "stop", "matched": met}
            if token in stop_ids:
                return ids[: at + 1], {"type": "stop", "matched": token}
        return ids[:most], {"type": "length" if len(ids) >= most else "stop"}

    def _answer(
        self, heard: Heard, ids: list[int], finish: dict[str, Any], version: str | None, changes: dict[str, Any]
    ) -> web.Response:
        heard.ids, heard.reason = ids, finish["type"]
        before, version = len(heard.prompt), self.version if version is None else version
        logprobs = [[logprob_of(token, before + at), token, None] for at, token in enumerate(ids)]
        meta: dict[str, Any] = {
            "id": heard.rid,
            "finish_reason": finish,
            "prompt_tokens": before,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}] if ids else [],
            "output_token_logprobs": logprobs,
        }
        if top := heard.body.get("top_logprobs_num", 0):
            meta["output_top_logprobs"] = [
                [[entry[0] - n, (entry[1] + n) % self.vocab_size, None] for n in range(top)] for entry in logprobs
            ]
        if heard.body.get("return_routed_experts"):
            rows = experts_of(before + len(ids), before)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            meta["routed_experts_shape"] = list(rows.shape)
        return _json({"text": "", "output_ids": ids, "meta_info": {**meta, **changes}})


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@contextmanager
def listening(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Serves `engine` on a loopback port, in a thread of this process; sets its `url`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="fake-engine")
    thread.start()
    engine.loop = loop

    async def start() -> web.AppRunner:
        # A client that leaves ends its request, as with a real engine.
        runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield engine
    finally:
        engine.release()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass(frozen=True)
class Stage:
    """A service on a fake engine, both in this process, and a client that keeps its connections."""

    live: LiveService
    engine: FakeEngine
    http: httpx.Client

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One control call; AssertionError unless it is answered with 200."""
        answer = self.http.request(method, path, json=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def open(self, rollout: str, **body: Any) -> str:
        """Opens a session; its key."""
        return str(self.admin("POST", "/v1/sessions", {"rollout_id": rollout, **body})["api_key"])

    def chat(self, key: str, messages: Sequence[Any], **body: Any) -> httpx.Response:
        """One model call."""
        headers = {"Authorization": f"Bearer {key}"}
        return self.http.post("/v1/chat/completions", json={"messages": list(messages), **body}, headers=headers)

    def turns(self, rollout: str) -> tuple[Turn, ...]:
        """What is on record."""
        return self.live.service.log.reader.read_trajectory(rollout).turns


@contextmanager
def service_on_fake(folder: Path, **changes: Any) -> Iterator[Stage]:
    """`folder` gets the tiny tokenizer and the store; `changes` go to the settings."""
    model, store = folder / "model", folder / "store"
    save_tokenizer(train_tokenizer(), model)
    codec = TokenCodec(model)
    with (
        listening(FakeEngine(codec.vocab_size, decode=codec.decode)) as engine,
        LiveService(settings(store, engine.url, **changes), model) as live,
        httpx.Client(base_url=live.url, timeout=60) as http,
    ):
        engine.heard.clear()  # the service's own probe
        yield Stage(live, engine, http)
