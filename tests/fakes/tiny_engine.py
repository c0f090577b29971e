"""An engine in this process with a small numpy model (`tests/fakes/tiny_model.py`), behind the surface that real ones have.

The surface, the loop and the ways of weights are those of the embedded engine; computing, caching and scheduling are written here, as
plainly as they can be. It starts in milliseconds, and a long completion takes half a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import uvicorn

from palestra.server.embedded.app import Api
from palestra.server.embedded.core import Core, Finished
from palestra.server.embedded.engine import Engine
from palestra.server.embedded.jobs import Job
from palestra.server.embedded.sampling import draw
from palestra.server.embedded.stops import StopWatch, Texts
from palestra.server.embedded.types import EngineOptions, GenerateCall
from palestra.server.embedded.weights import WeightViews
from palestra.server.ready import ReadyServer
from tests.fakes.tiny_model import WIDTH, Floats, log_softmax, next_logits, values

PACE_S = 0.001
"""What a step takes at least: tests catch long completions in the middle."""
WAIT_S = 30.0


class Known:
    """What the engine remembers of sequences that ended or were retracted."""

    page_size = 1

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[int], Floats]] = []

    def __len__(self) -> int:
        return sum(len(cache) for _, _, cache in self._kept)

    def keep(self, key: str, ids: list[int], cache: Floats) -> None:
        """Remembers the values of the leading ids."""
        self._kept.append((key, ids[: len(cache)], cache))

    def find(self, key: str, ids: list[int], most: int) -> Floats:
        """Values of the longest known beginning, of at most `most` ids."""
        best: Floats = np.zeros((0, WIDTH), np.float32)
        for other, kept, cache in self._kept:
            if other == key:
                same = next(
                    (n for n, (a, b) in enumerate(zip(kept, ids, strict=False)) if a != b), min(len(kept), len(ids))
                )
                if min(same, most) > len(best):
                    best = cache[: min(same, most)]
        return best

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()


class Desk:
    """Who runs and who waits, in order of arrival."""

    def __init__(self, max_running: int, max_tokens: int) -> None:
        self.max_running, self.max_tokens = max_running, max_tokens
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.store = Known()

    def add(self, job: Job) -> None:
        """Queues a job."""
        self.queue.append(job)
        self.queue.sort(key=lambda other: other.order)


class TinyCore:
    """What `Engine` asks of a core, over the numpy model."""

    def __init__(self, options: EngineOptions, pace_s: float) -> None:
        from safetensors.numpy import load_file

        folder = Path(options.model_path)
        config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Floats] = load_file(folder / "model.safetensors")
        # The views share memory with numpy's arrays: what they put in is what is computed with.
        parameters = [(name, torch.from_numpy(array)) for name, array in self.weights.items()]
        module = SimpleNamespace(
            named_parameters=lambda remove_duplicate: [(n, SimpleNamespace(data=t)) for n, t in parameters]
        )
        self.views = WeightViews(module, options.model_path)
        self.model = SimpleNamespace(vocab_size=config["vocab_size"], shape=SimpleNamespace(top_k=0))
        self.context_length = options.context_length or config["max_position_embeddings"]
        self.scheduler = Desk(options.max_running, 32 * self.context_length)
        self.texts = Texts(options.model_path)
        self.version, self.epoch, self._pace_s = "default", 0, pace_s
        self.generated = self.prompted = self.cached = 0
        self._caches: dict[Job, Floats] = {}

    def job(self, call: GenerateCall, order: int) -> Job:
        """See `Core`."""
        watch = StopWatch(call.stop, self.texts.decode, len(call.prompt)) if call.stop else None
        return Job(call, order, watch)

    def step(self) -> list[Finished]:
        """Every running request is read to its end and gets a token."""
        time.sleep(self._pace_s)
        desk = self.scheduler
        while desk.queue and len(desk.running) < desk.max_running:
            self._start(desk.queue.pop(0))
        finished = []
        for job in list(desk.running):
            cache = self._caches[job]
            fresh = values(self.weights, job.tokens[len(cache) :])
            self._caches[job] = cache = np.concatenate([cache, fresh])
            self._score(job, cache)
            if not job.call.max_new_tokens:
                job.versions = [(self.version, 0, 0)]
                finished.append(self.finish(job, {"type": "length", "length": 0}))
                continue
            drawn = draw(torch.from_numpy(next_logits(self.weights, cache))[None], [job.wish()])
            self.generated += 1
            if reason := job.append(drawn.ids[0], drawn.logprobs[0], self.version, drawn.tops[0]):
                finished.append(self.finish(job, reason))
        return finished

    def finish(self, job: Job, reason: dict[str, Any]) -> Finished:
        """See `Core`."""
        if job in self.scheduler.running:
            self._release(job)
        else:
            self.scheduler.queue.remove(job)
        return job, job.result(reason)

    def retract_all(self) -> None:
        """See `Core`."""
        for job in list(self.scheduler.running):
            self._release(job)
            job.retractions += 1
            self.scheduler.add(job)

    def load(self, tensors: dict[str, torch.Tensor], version: str) -> None:
        """See `Core`."""
        self.views.load(tensors)
        self.scheduler.store.clear()
        self.version, self.epoch = version, self.epoch + 1

    def _start(self, job: Job) -> None:
        job.started_running()
        most = len(job.tokens) - 1
        if job.unscored < len(job.call.prompt):
            most = min(most, job.call.input_from)
        found = self.scheduler.store.find(job.call.extra_key, job.tokens, most)
        if job.cached is None:
            job.cached = len(found)
            self.cached += len(found)
            self.prompted += len(job.call.prompt)
        job.epoch, self._caches[job] = self.epoch, found
        self.scheduler.running.append(job)

    def _release(self, job: Job) -> None:
        self.scheduler.running.remove(job)
        cache = self._caches.pop(job)
        if job.epoch == self.epoch:
            self.scheduler.store.keep(job.call.extra_key, job.tokens, cache)

    def _score(self, job: Job, cache: Floats) -> None:
        for place in range(job.unscored, len(job.call.prompt)):
            row = log_softmax(next_logits(self.weights, cache[:place]))
            job.scored.append(float(row[job.call.prompt[place]]))


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """One that is served."""

    url: str
    core: TinyCore
    """For a look at its counters; it is in use by the engine's thread."""


@contextmanager
def tiny_engine(folder: Path, *, pace_s: float = PACE_S, **options: Any) -> Iterator[TinyEngine]:
    """Serves a folder of `make_tiny_numpy` on a loopback port, from a thread of this process; `options` are `EngineOptions`."""
    settings = EngineOptions(str(folder), **options)
    core, ready = TinyCore(settings, pace_s), threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        stops: list[Callable[[], None]] = []
        main = _serve(core, settings, listener, ready, stops)
        thread = threading.Thread(target=asyncio.run, args=(main,), daemon=True, name="tiny-engine")
        thread.start()
        assert ready.wait(WAIT_S), "the tiny engine did not start"
        try:
            yield TinyEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", core)
        finally:
            for stop in stops:
                stop()
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the tiny engine did not end"


async def _serve(
    core: TinyCore,
    options: EngineOptions,
    listener: socket.socket,
    ready: threading.Event,
    stops: list[Callable[[], None]],
) -> None:
    engine = Engine(cast(Core, core), 1)
    api, work = Api(engine, options), asyncio.create_task(engine.run())
    config = uvicorn.Config(api.app(), access_log=False, log_level="warning", timeout_graceful_shutdown=1)
    server, loop = ReadyServer(config, ready.set), asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True
        work.cancel()
        api.updates.close()

    stops.append(lambda: loop.call_soon_threadsafe(stop) and None)
    await server.serve(sockets=[listener])
    await asyncio.wait({work})
