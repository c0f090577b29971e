"""The core: one batch step after another, without any thread or wait of its own.

In: jobs through the scheduler. Out: the jobs that a step finished, with their results. Its owner calls one method at a
time.

Why not transformers' continuous batching: on a CPU it attends from every token of a batch to the caches of all
requests, under a dense mask. Measured with two threads (transformers 5.24, fp32): a tiny Qwen3-MoE at 64 requests gave
876 tokens/s with prompts of 128 and 310 with prompts of 400; the shape of SmolLM2-135M at 32 requests with prompts of
256 gave 34. It also has no retract, returns nothing for a cancelled request, and its shared pages do not know about
weights. transformers' models are used as they are; only their attention function is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from palestra.server.embedded.jobs import Job
from palestra.server.embedded.model import SlotModel, load_model
from palestra.server.embedded.prefixes import PrefixStore
from palestra.server.embedded.sampling import draw
from palestra.server.embedded.scheduler import Scheduler
from palestra.server.embedded.stops import StopWatch, Texts
from palestra.server.embedded.types import EngineOptions, GenerateCall, GenerateResult
from palestra.server.embedded.weights import WeightViews
from palestra.server.embedded.workspace import Workspace

CACHE_BYTES = 1 << 30
Finished = tuple[Job, GenerateResult]


class Core:
    """Model, cache and scheduler of one engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Loads the model.

        Raises:
            ModelRefused: the folder cannot be served.
        """
        self.model: SlotModel = load_model(options.model_path, options.dtype)
        self.views = WeightViews(self.model.module, options.model_path)
        self.context_length = options.context_length or self.model.max_positions
        shape = self.model.shape
        tokens = options.max_total_tokens or max(2 * self.context_length, CACHE_BYTES // shape.bytes_per_token)
        space = Workspace(shape, options.max_running, self.context_length)
        store = PrefixStore(shape, max(1, tokens // options.page_size), options.page_size)
        self.scheduler = Scheduler(space, store, options.max_running, tokens, options.chunk_size)
        self.texts = Texts(options.model_path)
        self.version = "default"
        self.generated = self.prompted = self.cached = 0
        """Tokens since the start: sampled, in prompts of requests that ran, and taken from the prefix store of those."""

    def job(self, call: GenerateCall, order: int) -> Job:
        """A job for a call, `order`th to arrive; the scheduler does not have it yet.

        Raises:
            RequestRefused: it has stop texts, and the model folder has no tokenizer.
        """
        if not call.stop:
            return Job(call, order)
        self.texts.load()
        return Job(call, order, StopWatch(call.stop, self.texts.decode, len(call.prompt)))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Runs one batch: every running request gets a token, or a piece of its prompt is read."""
        pieces = self.scheduler.plan()
        if not pieces:
            return []
        logits = self.model.read(pieces, self.scheduler.space, len(self.scheduler.running))
        for piece in pieces:
            self.scheduler.filled(piece)
        ready = [piece.job for piece in pieces if piece.last]
        if not ready:
            return []
        drawn = draw(logits, [job.wish() for job in ready])
        finished = []
        for job, token, logprob, top in zip(ready, drawn.ids, drawn.logprobs, drawn.tops, strict=True):
            if not job.sampled:
                self.prompted += len(job.call.prompt)
                self.cached += job.cached or 0
            if reason := job.append(token, logprob, self.version, top):
                finished.append(self.finish(job, reason))
        self.generated += len(ready)
        return finished

    @torch.inference_mode()
    def finish(self, job: Job, reason: dict[str, Any]) -> Finished:
        """Takes a job out, running or queued, and gives its result."""
        experts = self._experts(job) if job.call.want_experts else None
        if job in self.scheduler.running:
            self.scheduler.release(job)
        else:
            self.scheduler.queue.remove(job)
        return job, job.result(reason, experts)

    @torch.inference_mode()
    def retract_all(self) -> None:
        """Puts every running request back into the queue; its slot is free."""
        for job in list(self.scheduler.running):
            self.scheduler.retract(job)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        """Puts in new weights that were checked. Whatever was computed with the old ones is never found again."""
        self.views.load(tensors)
        self.scheduler.new_epoch()
        self.version = version

    def _experts(self, job: Job) -> NDArray[np.int16] | None:
        """[tokens - 1, layers, top-k], where all of them have been read under the present slot."""
        experts = self.scheduler.space.experts
        rows = len(job.tokens) - 1
        if experts is None or job not in self.scheduler.running or job.filled < rows:
            return None
        taken: NDArray[np.int16] = experts[self.scheduler.running.index(job), :rows].numpy().copy()
        return taken
