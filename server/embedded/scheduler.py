"""Who runs: a queue in order of arrival, the running batch, and the room that both share.

In: jobs, aborts, retracts. Out: the pieces of work of the next step. Waits for nothing; everything here happens between
steps.

A request waits while another one is reading the same prompt: when that one has read it, its pages are in the prefix
store, and the siblings of a group read nothing twice.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from palestra.server.embedded.jobs import Job
from palestra.server.embedded.prefixes import PrefixStore
from palestra.server.embedded.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Piece:
    """Work of one step for one job: its tokens start..start+count go through the model."""

    job: Job
    slot: int
    start: int
    count: int

    @property
    def last(self) -> bool:
        """The job's next token can be drawn after it."""
        return self.start + self.count == len(self.job.tokens)

    @property
    def scores(self) -> range:
        """Places of the piece after which ids of the prompt stand whose logprobs are wanted."""
        end = min(self.start + self.count, len(self.job.call.prompt) - 1)
        return range(max(self.job.unscored - 1, self.start), end)


class Scheduler:
    """`running[i]` holds slot i of the workspace."""

    def __init__(self, space: Workspace, store: PrefixStore, max_running: int, max_tokens: int, chunk: int) -> None:
        self.space, self.store = space, store
        self.max_running, self.max_tokens, self.chunk = max_running, max_tokens, chunk
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.epoch = 0
        """Counts weight updates: pages of another epoch never enter the store."""

    def add(self, job: Job) -> None:
        """Queues a job at its place in order of arrival."""
        insort(self.queue, job, key=lambda other: other.order)

    def plan(self) -> list[Piece]:
        """Admits what fits, then gives the next step's work: all single tokens first, then pieces of prompts up to the chunk size."""
        self._shed()
        self._admit()
        singles, pieces, left = [], [], self.chunk
        for slot, job in enumerate(self.running):
            missing = len(job.tokens) - job.filled
            if missing == 1:
                singles.append(Piece(job, slot, job.filled, 1))
            elif left > 1:  # a piece of one token would be taken for a single
                count = min(missing, left)
                left -= count
                pieces.append(Piece(job, slot, job.filled, count))
        return singles + pieces

    def filled(self, piece: Piece) -> None:
        """The model has read a piece: remembers it, and shares a prompt that was read to its end."""
        piece.job.filled += piece.count
        if piece.last and piece.job.reading:
            piece.job.reading = False
            self._keep(piece.job, piece.slot)

    def retract(self, job: Job) -> None:
        """Takes a running job's slot; it reads everything again when its turn comes."""
        self.release(job)
        job.filled = 0
        job.retractions += 1
        self.add(job)

    def release(self, job: Job) -> None:
        """Takes a running job out; the last slot moves into its place."""
        slot = self.running.index(job)
        self._keep(job, slot)
        last = self.running.pop()
        if last is not job:
            self.running[slot] = last
            self.space.move(len(self.running), slot, last.filled)

    def new_epoch(self) -> None:
        """New weights: nothing computed before is found again."""
        self.epoch += 1
        self.store.clear()

    def _keep(self, job: Job, slot: int) -> None:
        if job.epoch == self.epoch:
            self.store.extend_names(job.names, job.tokens, job.call.extra_key)
            self.store.save(job.names[: job.filled // self.store.page_size], self.space, slot)

    def _shed(self) -> None:
        """Retracts the youngest while the running requests are larger than allowed; one always runs."""
        while len(self.running) > 1 and sum(len(job.tokens) for job in self.running) > self.max_tokens:
            self.retract(max(self.running, key=lambda job: job.order))

    def _admit(self) -> None:
        room = self.max_tokens - sum(len(job.tokens) for job in self.running)
        reading = {name for job in self.running if job.reading for name in job.names}
        for job in list(self.queue):
            if len(self.running) >= self.max_running or (self.running and len(job.tokens) > room):
                break
            self.store.extend_names(job.names, job.tokens, job.call.extra_key)
            # The last token is always read, so that there are logits to draw from.
            names = job.names[: self._takes(job) // self.store.page_size]
            known = self.store.match(names)
            if known < len(names) and names[known] in reading:
                continue
            self._start(job, names[:known])
            room -= len(job.tokens)
            reading.update(names[known:])

    def _takes(self, job: Job) -> int:
        """How many leading tokens it may take from the store: prompt ids whose logprobs are wanted have to be read again."""
        start = job.call.input_from
        return len(job.tokens) - 1 if job.unscored == len(job.call.prompt) else min(start, len(job.tokens) - 1)

    def _start(self, job: Job, names: list[bytes]) -> None:
        self.queue.remove(job)
        job.started_running()
        slot = len(self.running)
        self.space.reserve(len(job.tokens) + 1, slot)
        self.store.load(names, self.space, slot)
        self.running.append(job)
        job.filled, job.epoch, job.reading = len(names) * self.store.page_size, self.epoch, True
        if job.cached is None:
            job.cached = job.filled
