"""The class that users derive from to say how data is made: where tasks come from, which are played, and what becomes of each group.

Nothing goes in: a plan is made without arguments, in the worker. What it does not override is done as without a plan, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from palestra.agents.plans.history import History
from palestra.agents.types import GroupAssignment, ReviewRequest, Verdict
from palestra.envs.types import Episode, Task

PlayGroup: TypeAlias = Callable[[GroupAssignment], list[Episode]]
"""Plays an assignment, or a part of it, and waits for its episodes."""


class RolloutPlan:
    """What a run plays. Override what you need; methods can be called from several threads at once."""

    reweigh_every: ClassVar[int] = 16
    """Complete groups after which `weights` is asked again."""
    size: int | None = None
    """How many tasks there are, once they are known; None for a stream. Set before `weights` is asked for the first time."""
    history: History
    """What came of each task so far, by its index. Kept with the run; filled where `weights` or `review` is overridden."""

    def tasks(self) -> Any:
        """Where tasks come from: a sequence of Tasks, a dataset object, a path, or a function that yields tasks (which need not end). Make
        them of other records with `palestra.envs.tasksources.source_of(records, to_task)`. None: those of the environment."""
        return None

    def weights(self) -> Sequence[float] | None:
        """How often each task is drawn, by its share of all weights. None: each once an epoch. Not for streams."""
        return None

    def accept(self, task: Task) -> bool | str:
        """Whether a task is played at all. False, or a word that says why not: its place is given to the next one."""
        return True

    def run_group(self, assignment: GroupAssignment, play: PlayGroup) -> None:
        """Has the rollouts of a group played. Each of `assignment.rollouts` must be played once, by any number of calls of `play`."""
        play(assignment)

    def review(self, group: ReviewRequest) -> Verdict | None:
        """What becomes of a complete group: kept or dropped, and with which rewards. None: kept as it is. The run's own filters
        (`algo.drop_zero_variance` and the like) come after it."""
        return None


def overrides(plan: RolloutPlan, name: str) -> bool:
    """Whether a plan has a method of its own."""
    return getattr(type(plan), name) is not getattr(RolloutPlan, name) or name in vars(plan)
