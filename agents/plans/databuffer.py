"""The `data_buffer` of a training run: where prompts come from, and where it is said what becomes of them.

Prompts come from the run's service, as the schedule allows; samples go back as verdicts. A plain `get_samples` gives what can be had at
once; awaited, it waits for the schedule, at most until its deadline, while the event loop goes on. `put` and `drop` wait for nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import Counter, deque
from functools import partial
from typing import Any

from palestra.agents.plans.buffers import Prompts, flat
from palestra.agents.plans.desk import FunctionDesk
from palestra.agents.plans.driver import check_rewards
from palestra.agents.plans.prompts import Prompt
from palestra.agents.plans.types import NoMoreWorkError, PlanError, PlanService, Sample
from palestra.agents.types import GroupAssignment, ReviewRequest, Verdict

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How long one call waits for work."""
LULL_S = 0.5
"""An awaited `get_samples` that has some prompts ends when no further one came for so long: the others would come with the next step."""
SETTLE_S = 60.0
"""Longest wait for verdicts that are on their way."""
EMPTY = 100
"""So many calls in a row that give nothing, while rollouts go on, are a loop that keeps them from going on."""
LOST = "function_lost"
"""Of a group that was complete when the process that had asked for it was gone: nobody knows whether its function would have kept it."""


class TrainingBuffer:
    """A `DataBuffer` on a run's service. Lives as long as the runner: what a function leaves open is there in its next call."""

    def __init__(self, service: PlanService, desk: FunctionDesk, deadline_s: float) -> None:
        """`deadline_s`: longest wait of an awaited `get_samples`."""
        self._service, self._desk, self._deadline_s = service, desk, deadline_s
        self._prompts: dict[str, Prompt] = {}
        """Those that are not settled, by group."""
        self._waiting: deque[Prompt] = deque()
        """Those that no function has seen, or began to play."""
        self._verdicts: list[concurrent.futures.Future[None]] = []
        self._empty = 0
        self.counts: Counter[str] = Counter()
        """Groups by what became of them."""

    # What a function calls.

    def get_samples(self, n: int) -> Prompts:
        """See `DataBuffer.get_samples`. Fewer than `n` where the schedule opens no more groups now.

        Raises:
            PlanError: `n` is no number of prompts.
            NoMoreWorkError: at the first look, or while it is awaited: there is none, and no rollout goes on that could free a place.
        """
        if not isinstance(n, int) or n < 1:
            raise PlanError(f"get_samples({n!r}): ask for at least one prompt")
        return Prompts(self, n)

    def put(self, samples: Any) -> None:
        """See `DataBuffer.put`. A sample that was put before counts once.

        Raises:
            PlanError: something is no sample of this run, or its reward is no number.
        """
        by_group: dict[str, dict[int, Sample]] = {}
        for sample in flat(samples):
            prompt = self._prompts.get(sample.group_id)
            if prompt is None:
                continue  # kept or dropped already
            if prompt.samples.get(sample.index) is None:
                raise PlanError(
                    f"rollout {sample.index} of {sample.group_id} gave no sample, and one was returned for it"
                )
            by_group.setdefault(sample.group_id, {})[sample.index] = sample
        for group_id, kept in by_group.items():
            self._keep(self._prompts[group_id], kept)

    def drop(self, prompt: Prompt | Sample, reason: str = "") -> None:
        """See `DataBuffer.drop`."""
        known = self._prompts.get(prompt.group_id)
        if known is not None:
            self._settle(known, Verdict(keep=False, reason=reason))

    # What `Prompts` calls.

    def take_now(self, n: int) -> list[Prompt]:
        """What can be had at once: it blocks for as long as the service takes to answer."""
        concurrent.futures.wait(self._verdicts, SETTLE_S)
        self._raise_failed()
        got: list[Prompt] = []
        while len(got) < n and (prompt := self._next()) is not None:
            got.append(prompt)
        goes_on = any(prompt.open for prompt in self._prompts.values())
        self._empty = 0 if got else self._empty + 1
        if not got and (not goes_on or self._empty > EMPTY):
            raise NoMoreWorkError(self._why())
        return got

    async def take(self, n: int) -> list[Prompt]:
        """What comes until `n` are there, no further one came for a while, or the deadline is over."""
        await self._flush()
        got: list[Prompt] = []
        deadline = time.monotonic() + self._deadline_s
        while len(got) < n:
            if self._waiting:
                got.append(self._waiting.popleft())
                continue
            began = time.monotonic()
            wait = LULL_S if got else min(POLL_S, deadline - began)
            if wait <= 0:
                raise NoMoreWorkError(f"{self._why()} (waited {self._deadline_s:g} s)")
            if (prompt := self._take_in(await self._desk.call(partial(self._service.work, wait)))) is not None:
                got.append(prompt)
            elif got and time.monotonic() - began >= LULL_S:
                break
        return got

    # What the runner calls.

    def offer(self, work: GroupAssignment | ReviewRequest | None) -> None:
        """Takes in what the service gave."""
        prompt = self._take_in(work)
        if prompt is not None:
            self._waiting.append(prompt)

    @property
    def busy(self) -> bool:
        """Whether there are prompts that a function was not done with, or has not seen."""
        return bool(self._prompts)

    async def end_call(self, returned: Any) -> None:
        """Settles what a call leaves behind: what it returned is kept, what it played without returning it is filtered. Prompts that it did
        not begin are there in the next call, and so are those whose rollouts go on. Waits for verdicts that are on their way.

        Raises:
            PlanError: it returned something else than samples.
        """
        self.put(returned)
        for prompt in list(self._prompts.values()):
            if prompt.open or prompt in self._waiting:
                continue
            if not prompt.begun:
                self._waiting.append(prompt)
            elif prompt.samples:
                self._settle(prompt, Verdict(keep=False))
            else:  # faults alone: the service's own filter calls it so
                self._settle(prompt, Verdict())
        await self._flush()

    # Inside.

    def _next(self) -> Prompt | None:
        if self._waiting:
            return self._waiting.popleft()
        while (work := self._service.work(0.0)) is not None:
            if (prompt := self._take_in(work)) is not None:
                return prompt
        return None

    def _take_in(self, work: GroupAssignment | ReviewRequest | None) -> Prompt | None:
        """A prompt that was not known; None where it is part of one that is, or a review, or nothing."""
        if work is None:
            return None
        known = self._prompts.get(work.group_id)
        if isinstance(work, ReviewRequest):
            if known is None:
                logger.warning("group %s was complete when its function was gone; it is dropped", work.group_id)
                self._submit(work.group_id, Verdict(keep=False, reason=LOST))
            return None
        if known is not None:
            known.add(work)
            return None
        prompt = self._prompts[work.group_id] = Prompt(work, self._desk)
        return prompt

    def _keep(self, prompt: Prompt, kept: dict[int, Sample]) -> None:
        rewards: dict[int, float | None] = {index: None for index in prompt.samples if index not in kept}
        for index, sample in kept.items():
            if sample.reward != prompt.samples[index].reward:
                rewards[index] = sample.reward
        check_rewards(rewards.values(), "the function")
        self._settle(prompt, Verdict(rewards=rewards))

    def _settle(self, prompt: Prompt, verdict: Verdict) -> None:
        prompt.settled = True
        del self._prompts[prompt.group_id]
        if prompt in self._waiting:
            self._waiting.remove(prompt)
        self.counts["kept" if verdict.keep else f"dropped({verdict.reason})" if verdict.reason else "dropped"] += 1
        self._submit(prompt.group_id, verdict)

    def _submit(self, group_id: str, verdict: Verdict) -> None:
        self._verdicts = [future for future in self._verdicts if not future.done() or future.exception() is not None]
        self._verdicts.append(self._desk.submit(lambda: self._service.verdict(group_id, verdict)))

    async def _flush(self) -> None:
        """Waits for verdicts that are on their way: what they free can be handed out then."""
        if self._verdicts:
            await asyncio.wait([asyncio.wrap_future(verdict) for verdict in self._verdicts], timeout=SETTLE_S)
        self._raise_failed()

    def _raise_failed(self) -> None:
        """Raises what a verdict failed with: the service is gone, or refuses it."""
        verdicts, self._verdicts = self._verdicts, []
        for verdict in verdicts:
            if not verdict.done():
                raise TimeoutError(f"the service took no verdict within {SETTLE_S:g} s")
            verdict.result()

    def _why(self) -> str:
        held = (
            f"; this function holds {len(self._prompts)} prompts that it neither returned, put nor dropped"
            if self._prompts
            else ""
        )
        return (
            f"the schedule opens no more groups now: {self._service.waits()}{held}. "
            "`await data_buffer.get_samples(n)` waits for the next ones"
        )
