"""The loop of the fake engine: requests in, a token for each that runs per step, answers out. One asyncio task, and no threads.

Values of positions are computed once, with the weights of their time, and kept: so a cache that outlives its weights shows in the logprobs,
as it does in a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from palestra.server.embedded.stops import StopWatch
from palestra.server.embedded.types import GenerateCall, GenerateResult, RequestRefused
from palestra.server.renderer.tokens import TokenCodec
from tests.fakes.tiny_draw import Top, draw
from tests.fakes.tiny_model import WIDTH, Floats, log_softmax, next_logits, values

MODES = ("abort", "retract", "in_place")


def nothing() -> Floats:
    """The values of no position."""
    return np.zeros((0, WIDTH), np.float32)


@dataclass(eq=False)
class Live:
    """A request under way."""

    call: GenerateCall
    order: int
    done: asyncio.Future[GenerateResult]
    watch: StopWatch | None
    tokens: list[int]
    """Prompt and completion."""
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    cache: Floats = field(default_factory=nothing)
    epoch: int = 0
    """Of the weights that its oldest values were computed with."""
    cached: int | None = None
    scored: tuple[float, ...] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    waited: float | None = None
    retractions: int = 0

    @property
    def completion(self) -> list[int]:
        """Ids after the prompt."""
        return self.tokens[len(self.call.prompt) :]

    def end(self, reason: dict[str, Any]) -> None:
        """Answers with what there is."""
        if self.done.done():
            return
        result = GenerateResult(
            token_ids=tuple(self.completion),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            versions=tuple(self.spans),
            cached_tokens=self.cached or 0,
            top_logprobs=tuple(self.tops),
            input_logprobs=self.scored,
            queue_s=time.perf_counter() - self.arrived if self.waited is None else self.waited,
            retractions=self.retractions,
        )
        self.done.set_result(result)


class TinyCore:
    """Who waits, who runs, what is remembered. All methods run on the loop that `run` runs on."""

    def __init__(self, folder: Path, weights: Mapping[str, Floats], *, max_running: int, pace_s: float) -> None:
        """`pace_s`: what a step takes, so that tests catch long completions in the middle."""
        self.weights, self.version, self.epoch = weights, "default", 0
        self.max_running, self._pace_s = max_running, pace_s
        self.paused = False
        self.queue: list[Live] = []
        self.running: list[Live] = []
        self.generated = self.prompted = self.reused = 0
        self._codec = TokenCodec(folder)
        self._known: list[tuple[str, list[int], Floats]] = []
        self._arrivals = 0
        self._wake = asyncio.Event()

    async def generate(self, call: GenerateCall) -> GenerateResult:
        """Waits for the request's end; a caller that is cancelled takes it along.

        Raises:
            RequestRefused: its rid is under way.
        """
        if any(live.call.rid == call.rid for live in [*self.running, *self.queue]):
            raise RequestRefused(f"a request with rid {call.rid!r} is under way already")
        self._arrivals += 1
        watch = StopWatch(call.stop, self._codec.decode, len(call.prompt)) if call.stop else None
        live = Live(call, self._arrivals, asyncio.get_running_loop().create_future(), watch, list(call.prompt))
        self.queue.append(live)
        self._wake.set()
        try:
            return await live.done
        finally:
            self._drop(live)

    async def run(self) -> None:
        """Generates until it is cancelled. A fault in a step ends it, and is told to all who wait."""
        while True:
            if self.paused or not (self.queue or self.running):
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._step()
            except Exception as fault:
                for live in [*self.running, *self.queue]:
                    live.done.set_exception(fault)
                raise
            await asyncio.sleep(self._pace_s)

    def pause(self, mode: str) -> None:
        """No step until `resume`.

        Raises:
            RequestRefused: there is no such mode.
        """
        if mode not in MODES:
            raise RequestRefused(f"mode {mode!r} is not one of {', '.join(MODES)}")
        self.paused = True
        if mode == "abort":
            self.abort(lambda live: True)
        elif mode == "retract":
            self.retract()

    def resume(self) -> None:
        """Goes on."""
        self.paused = False
        self._wake.set()

    def abort(self, which: Callable[[Live], bool]) -> int:
        """Ends requests; how many."""
        lives = [live for live in [*self.running, *self.queue] if which(live)]
        for live in lives:
            self._drop(live)
            live.end({"type": "abort", "message": "aborted by request"})
        return len(lives)

    def retract(self) -> None:
        """Who runs waits again, in order of arrival, and forgets what it has computed."""
        for live in list(self.running):
            self._drop(live)
            live.retractions += 1
            self.queue.append(live)
        self.queue.sort(key=lambda live: live.order)

    def flush(self) -> None:
        """Nothing is remembered of requests that ended; those that run keep what they have."""
        self._known.clear()

    def put_in(self, weights: Mapping[str, Floats], version: str) -> None:
        """Other weights from the next step on. Without a pause, who runs is retracted."""
        if not self.paused:
            self.retract()
        self.weights, self.version, self.epoch = weights, version, self.epoch + 1
        self.flush()

    def _step(self) -> None:
        while self.queue and len(self.running) < self.max_running:
            self._start(self.queue.pop(0))
        for live in list(self.running):
            live.cache = np.concatenate([live.cache, values(self.weights, live.tokens[len(live.cache) :])])
            if reason := self._advance(live):
                self._drop(live)
                live.end(reason)

    def _start(self, live: Live) -> None:
        if live.waited is None:
            live.waited = time.perf_counter() - live.arrived
        most = len(live.tokens) - 1
        if live.call.input_from >= 0 and live.scored is None:
            most = min(most, live.call.input_from)
        live.cache, live.epoch = self._find(live.call.extra_key, live.tokens, most), self.epoch
        if live.cached is None:
            live.cached = len(live.cache)
            self.reused += live.cached
            self.prompted += len(live.call.prompt)
        self.running.append(live)

    def _advance(self, live: Live) -> dict[str, Any] | None:
        """One more token. The reason, if it was the last one."""
        call = live.call
        if call.input_from >= 0 and live.scored is None:
            live.scored = self._score(live)
        if not call.max_new_tokens:
            live.spans = [(self.version, 0, 0)]
            return {"type": "length", "length": 0}
        token, logprob, top = draw(next_logits(self.weights, live.cache), call, live.completion)
        at = len(live.logprobs)
        live.tokens.append(token)
        live.logprobs.append(logprob)
        live.tops += [top] if call.top_logprobs else []
        start = live.spans.pop()[1] if live.spans and live.spans[-1][0] == self.version else at
        live.spans.append((self.version, start, at + 1))
        self.generated += 1
        if live.watch is not None and (text := live.watch.check(live.tokens)) is not None:
            return {"type": "stop", "matched": text}
        if token in call.stop_ids:
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": at + 1} if at + 1 >= call.max_new_tokens else None

    def _score(self, live: Live) -> tuple[float, ...]:
        prompt = live.call.prompt
        places = range(live.call.input_from + 1, len(prompt))
        return tuple(
            float(log_softmax(next_logits(self.weights, live.cache[:place]))[prompt[place]]) for place in places
        )

    def _drop(self, live: Live) -> None:
        """Takes a request out, and remembers what it computed, if that is of the weights in force."""
        if live in self.running:
            self.running.remove(live)
            if live.epoch == self.epoch:
                self._known.append((live.call.extra_key, live.tokens[: len(live.cache)], live.cache))
            live.cache = nothing()
        elif live in self.queue:
            self.queue.remove(live)

    def _find(self, key: str, ids: list[int], most: int) -> Floats:
        """Values of the longest known beginning, of at most `most` ids."""
        best = nothing()
        for other, known, cache in self._known:
            same = 0
            while other == key and same < min(most, len(known)) and known[same] == ids[same]:
                same += 1
            if same > len(best):
                best = cache[:same]
        return best
