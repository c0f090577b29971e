"""One rollout as a function of the user's plays it: a session that is open inside `async with`.

A place of a prompt goes in, a `Sample` comes out. Whatever is raised inside is the fault of this rollout alone: it has no reward. It waits
for the service.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from palestra.agents.plans.desk import FunctionDesk
from palestra.agents.plans.types import Masks, PlanError, Sample, SessionRow, SettledError
from palestra.agents.play import infra_episode, message_env
from palestra.agents.stops import stop_in
from palestra.agents.transcript import after_prompt, main_branch
from palestra.agents.types import AgentError, GroupAssignment, SessionHandle
from palestra.envs.types import Episode, Message, Reward, StopReason

if TYPE_CHECKING:
    import openai

    from palestra.agents.plans.prompts import Prompt

logger = logging.getLogger(__name__)

MakeMask: TypeAlias = Callable[[SessionRow], Sequence[int]]
"""A row -> its mask."""


class Rollout:
    """One session, open inside `async with`."""

    def __init__(self, prompt: Prompt, index: int, assignment: GroupAssignment, desk: FunctionDesk) -> None:
        self.prompt, self.index = prompt, index
        self._assignment, self._desk = assignment, desk
        self._handle: SessionHandle | None = None
        self._fault: Exception | None = None
        self._closed = False

    async def __aenter__(self) -> Rollout:
        """Opens the session. Where that fails, whatever is asked of the rollout first raises why: it is this rollout's fault alone."""
        if self.prompt.settled:
            self._fault = SettledError(f"prompt {self.prompt.group_id} was kept or dropped meanwhile")
            return self
        try:
            self._handle = await self._desk.call(
                lambda: self._desk.host.open_session(self._assignment, self.index, self.prompt.task.id)
            )
            self.prompt.open.add(self.index)
        except AgentError as error:
            self._fault = error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Ends the session where no sample did."""
        task_id = self.prompt.task.id
        if error is None:
            await self._end(_unscored(task_id, StopReason.CANCELLED, "left without a sample"))
            return False
        if not isinstance(error, Exception):  # cancelled: whoever did it does not wait for the service
            self._desk.later(self._end(_unscored(task_id, StopReason.CANCELLED, "cancelled")))
            return False
        if (stop := stop_in(error)) is not None:
            await self._end(_unscored(task_id, stop.reason, str(stop)))
        elif not isinstance(error, SettledError):
            logger.warning("rollout %d of %s failed", self.index, self.prompt.group_id, exc_info=error)
            self._desk.note_fault(error)
            await self._end(infra_episode(task_id, error))
        return True

    @property
    def base_url(self) -> str:
        """OpenAI base URL of the service, ending in /v1; `api_key` says whose session it is."""
        return self._opened.base_url

    @property
    def session_url(self) -> str:
        """OpenAI base URL of this very session: for agents that cannot be given a key."""
        return self._opened.session_url or self._opened.base_url

    @property
    def api_key(self) -> str:
        """Opens this session and nothing else."""
        return self._opened.api_key

    @property
    def rollout_id(self) -> str:
        """The session's id."""
        return self._opened.rollout_id

    @property
    def client(self) -> openai.AsyncOpenAI:
        """The official client, for this session."""
        return self._desk.client(self.base_url, self.api_key)

    async def rows(self) -> tuple[SessionRow, ...]:
        """The session's tokens as they stand, a row per branch.

        Raises:
            AgentError: the service is gone, or the session has ended.
        """
        handle = self._opened
        return await self._desk.call(lambda: self._desk.host.rows(handle))

    async def conversation(self) -> Sequence[Sequence[Message]]:
        """The session's branches in messages.

        Raises:
            AgentError: as `rows`.
        """
        handle = self._opened
        return await self._desk.call(lambda: self._desk.host.conversation(handle))

    async def score(self) -> Reward:
        """What the environment's own rubric says of the conversation.

        Raises:
            AgentError: as `rows`.
            EnvError: the environment failed.
        """
        handle = self._opened
        return await self._desk.call(lambda: self._score(handle))

    async def sample(
        self,
        reward: float | Reward | None,
        *,
        components: Mapping[str, float] | None = None,
        loss_mask: Sequence[int] | Masks | MakeMask | None = None,
        truncated: bool = False,
    ) -> Sample:
        """Ends the rollout with its reward, and gives the sample to return. `loss_mask`: 0 or 1 per token of the row (of each row, where
        the conversation has branches), or a function that makes it of a row; None: all that was sampled.

        Raises:
            PlanError: the reward or the mask cannot be one.
            MaskRefusedError: the mask has a 1 on a token that the engine did not sample; the rollout goes on.
            SettledError: the prompt was kept or dropped meanwhile.
            AgentError: the service is gone.
        """
        handle = self._opened
        given = reward if isinstance(reward, Reward) else Reward(None if reward is None else float(reward))
        if given.value is not None and not math.isfinite(given.value):
            raise PlanError(f"the reward is {given.value}: it must be a number, or None where it is unknown")
        scored = replace(given, components={**given.components, **(components or {})})
        rows = await self.rows()
        masks = None if loss_mask is None or not rows else masks_of(loss_mask, rows)
        episode = Episode(
            task_id=self.prompt.task.id,
            messages=(),
            tools=(),
            reward=scored,
            step_rewards=(),
            stop_reason=StopReason.MAX_TURNS if truncated else StopReason.ANSWER,
            terminated=not truncated,
            truncated=truncated,
            turns=sum(_replies(row) for row in rows),
        )
        if self.prompt.settled:
            raise SettledError(f"prompt {self.prompt.group_id} was kept or dropped meanwhile")
        await self._close(handle, episode, masks)
        sample = Sample(
            group_id=self.prompt.group_id,
            index=self.index,
            rollout_id=handle.rollout_id,
            attempt=handle.attempt,
            task=self.prompt.task,
            reward=scored.value,
            components=scored.components,
            rows=rows,
            masks=tuple(map(tuple, masks if masks is not None else [row.loss_mask for row in rows])),
            truncated=truncated,
        )
        self.prompt.samples[self.index] = sample
        self._desk.samples += 1
        return sample

    @property
    def _opened(self) -> SessionHandle:
        if self._fault is not None:
            raise self._fault
        if self._handle is None:
            raise PlanError("a rollout is open inside `async with prompt.rollout() as rollout` alone")
        return self._handle

    def _score(self, handle: SessionHandle) -> Reward:
        env = self._desk.make_env()
        try:
            prompt, _ = env.reset(seed=self.prompt.seed, options={"task": self.prompt.task})
            said = main_branch(self._desk.host.conversation(handle))
            info = message_env(env).grade(after_prompt(said, prompt))
        finally:
            env.close()
        return info.reward or Reward(None, note="never scored")

    async def _end(self, episode: Episode) -> None:
        """Closes what is still open; a service that refuses that has its own deadline for the rollout."""
        if self._handle is None or self._closed or self.prompt.settled:
            self.prompt.open.discard(self.index)
            return
        try:
            await self._close(self._handle, episode, None)
        except AgentError as error:
            logger.warning("rollout %d of %s was not closed: %s", self.index, self.prompt.group_id, error)

    async def _close(self, handle: SessionHandle, episode: Episode, masks: Masks | None) -> None:
        await self._desk.call(lambda: self._desk.host.close_session(handle, episode, masks))
        self._closed = True
        self.prompt.open.discard(self.index)


def masks_of(given: Sequence[int] | Masks | MakeMask, rows: Sequence[SessionRow]) -> Masks:
    """One mask per row.

    Raises:
        PlanError: there are not as many masks as rows.
    """
    if callable(given):
        return [[int(one) for one in given(row)] for row in rows]
    nested: list[list[int]] = []
    whole: list[int] = []
    for part in given:
        if isinstance(part, Sequence):
            nested.append([int(one) for one in part])
        else:
            whole.append(int(part))
    if whole and not nested and len(rows) == 1:
        return [whole]
    if len(nested) != len(rows):
        raise PlanError(
            f"the conversation has {len(rows)} branches, and so many rows: loss_mask must be a mask per row, or a function of one"
        )
    return nested


def _replies(row: SessionRow) -> int:
    """Stretches of sampled tokens."""
    before = ("", *row.sources)
    return sum(here == "sampled" and last != "sampled" for last, here in zip(before, row.sources, strict=False))


def _unscored(task_id: str, reason: StopReason, note: str) -> Episode:
    """The end of a rollout that nobody gave a reward, and that is no fault."""
    return Episode(
        task_id=task_id,
        messages=(),
        tools=(),
        reward=Reward(None, note=note),
        step_rewards=(),
        stop_reason=reason,
        terminated=False,
        truncated=True,
        turns=0,
    )
