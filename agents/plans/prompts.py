"""Prompts as a function of the user's sees them: a task of a group, with the rollouts of it that are to be played.

An assignment of the service goes in; `async with prompt.rollout() as rollout` plays one. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from palestra.agents.plans.desk import FunctionDesk
from palestra.agents.plans.rollouts import Rollout
from palestra.agents.plans.types import PlanError, Sample
from palestra.agents.types import GroupAssignment
from palestra.envs.types import Message, Task, ToolSpec


class Prompt:
    """One task, to be played `n_samples` times."""

    def __init__(self, assignment: GroupAssignment, desk: FunctionDesk) -> None:
        self._desk, self._assignment = desk, assignment
        self.task: Task = assignment.task if isinstance(assignment.task, Task) else desk.source[assignment.task]
        self.group_id = assignment.group_id
        self.seed = assignment.seed
        """Seeds the environment; equal for all rollouts of the prompt."""
        self.n_samples = len(assignment.rollouts)
        """Rollouts to be played: the group's size, but for those that were played before a restart."""
        self.samples: dict[int, Sample] = {}
        """By index: the samples that were made of it so far."""
        self.settled = False
        """Whether its fate is decided: kept or dropped."""
        self.begun = 0
        """Rollouts that were begun."""
        self.open: set[int] = set()
        """Indices of those that go on."""
        self._free: deque[tuple[int, int]] = deque()
        self.add(assignment)

    @property
    def messages(self) -> list[Message]:
        """The first messages, fresh copies: the task's own, behind the environment's system message."""
        return self._desk.messages(self.task)

    @property
    def tools(self) -> list[ToolSpec]:
        """The environment's tools as they are described to a model, fresh copies."""
        return self._desk.tool_specs()

    def rollout(self) -> Rollout:
        """The next rollout of it, to be entered by `async with`.

        Raises:
            PlanError: all of them were begun.
        """
        if not self._free and not self.settled:
            raise PlanError(
                f"all {self.n_samples} rollouts of prompt {self.group_id} were begun: play each once (see prompt.n_samples)"
            )
        self.begun += 1
        index, attempt = self._free.popleft() if self._free else (0, 0)
        return Rollout(self, index, replace(self._assignment, attempt=attempt), self._desk)

    def add(self, assignment: GroupAssignment) -> None:
        """More rollouts to be played: those that a fault ended, at their next attempt."""
        again = set(assignment.rollouts)
        self._free = deque(place for place in self._free if place[0] not in again)
        self._free.extend((index, assignment.attempt) for index in assignment.rollouts)
