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
from palestra.server.embedded.scheduler import Piece, Scheduler
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
        logits, ready = self._score(pieces, logits)
        for job in ready:
            if not job.sampled:
                self.prompted += len(job.call.prompt)
                self.cached += job.cached or 0
        # Those that only wanted their prompt read are at their end before anything is drawn.
        drawing = [job for job in ready if job.call.max_new_tokens]
        finished = []
        for job in ready:
            if not job.call.max_new_tokens:
                job.versions = [(self.version, 0, 0)]
                finished.append(self.finish(job, {"type": "length", "length": 0}))
        if not drawing:
            return finished
        rows = [row for row, job in enumerate(ready) if job.call.max_new_tokens]
        drawn = draw(logits if len(rows) == len(ready) else logits[rows], [job.wish() for job in drawing])
        for job, token, logprob, top in zip(drawing, drawn.ids, drawn.logprobs, drawn.tops, strict=True):
            if reason := job.append(token, logprob, self.version, top):
                finished.append(self.finish(job, reason))
        self.generated += len(drawing)
        return finished

    def _score(self, pieces: list[Piece], logits: torch.Tensor) -> tuple[torch.Tensor, list[Job]]:
        """Takes note of what was read. Returns the logits that are drawn from, and whose they are."""
        drawn, at = [], 0
        for piece in pieces:
            job, places = piece.job, piece.scores
            if places:
                rows = logits[at : at + len(places)].float().log_softmax(-1)
                ids = torch.tensor(job.tokens[places.start + 1 : places.stop + 1])
                job.scored += rows.gather(-1, ids[:, None])[:, 0].tolist()
                at += len(places)
            if piece.last:
                drawn.append(at)
                at += 1
            self.scheduler.filled(piece)
        ready = [piece.job for piece in pieces if piece.last]
        return logits if len(drawn) == len(logits) else logits[drawn], ready

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
