"""A plan of the user's as the worker asks it: every answer is checked, and what the plan does not override is not asked for.

In: assignments and reviews of the service. Out: what the worker tells the service. An answer that cannot be used is a `PlanError`; whatever
the plan itself raises goes through. Nothing is waited for but the plan.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from palestra.agents.plans.plan import PlayGroup, RolloutPlan, overrides
from palestra.agents.plans.types import PlanError
from palestra.agents.types import GroupAssignment, ReviewRequest, Verdict
from palestra.envs.tasks import TaskSource
from palestra.envs.tasksources import StreamedTasks, source_of
from palestra.envs.types import Episode, Task

REMEMBERED = 512
"""Verdicts that are kept in case their review is handed out again: a plan is asked about a group once."""
NOT_ACCEPTED = "not_accepted"


@dataclass(frozen=True, slots=True)
class Registration:
    """What the service has to know of a worker's tasks and program."""

    tasks: int | None
    """None: a stream, which gives as many as are asked for."""
    weights: tuple[float, ...] | None
    reviews: bool
    """Whether complete groups are to be reviewed."""


class PlanDriver:
    """Asks one plan."""

    def __init__(self, plan: RolloutPlan, given: Callable[[], TaskSource]) -> None:
        """`given`: opens the tasks of the run's file or environment, where the plan has none of its own.

        Raises:
            PlanError: the plan's tasks are none, or weights are of a stream.
        """
        self.plan = plan
        own = plan.tasks() if overrides(plan, "tasks") else None
        self.own_tasks = own is not None
        """Whether tasks are the plan's, and not known to the service or the environment."""
        self.source: TaskSource | StreamedTasks = given() if own is None else source_of(own, name="the plan's tasks")
        self.count = None if isinstance(self.source, StreamedTasks) else len(self.source)
        plan.size = self.count
        self._reviews, self._weighs = overrides(plan, "review"), overrides(plan, "weights")
        self._accepts = overrides(plan, "accept")
        if self._weighs and self.count is None:
            raise PlanError(
                "the plan has weights, and a stream of tasks, which has no end: give a sequence, or weigh in the stream"
            )
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._indices: Mapping[str, int] | None = None

    def registration(self) -> Registration:
        """Tasks, and weights as the plan gives them at present.

        Raises:
            PlanError: not one weight per task, or one that is none.
        """
        return Registration(self.count, self._weights(), self._reviews or self._weighs)

    def task_of(self, task: Task | int) -> Task:
        """The task itself."""
        return task if isinstance(task, Task) else self.source[task]

    def resolve(self, assignment: GroupAssignment) -> GroupAssignment:
        """The assignment as it is played: with the task itself where the environment does not know it."""
        return replace(assignment, task=self.task_of(assignment.task)) if self.own_tasks else assignment

    def refusal(self, assignment: GroupAssignment) -> str | None:
        """Why the plan does not have a task played; None: it does.

        Raises:
            PlanError: the plan said neither yes nor no.
        """
        whole = len(assignment.rollouts) == assignment.group_size
        if not self._accepts or not whole or assignment.replay:
            return None  # what is played again had been accepted
        said = self.plan.accept(self.task_of(assignment.task))
        if isinstance(said, str):
            return said or NOT_ACCEPTED
        if not isinstance(said, bool):
            raise PlanError(f"accept gave {type(said).__name__}: it must be True, False, or a word that says why not")
        return None if said else NOT_ACCEPTED

    def run(self, assignment: GroupAssignment, play: PlayGroup) -> None:
        """Has the plan play a group.

        Raises:
            PlanError: it did not have all rollouts played, or one more than once.
        """
        if not overrides(self.plan, "run_group"):
            play(assignment)
            return
        played: list[int] = []

        def counted(part: GroupAssignment) -> list[Episode]:
            played.extend(part.rollouts)
            return play(part)

        self.plan.run_group(assignment, counted)
        if sorted(played) != sorted(assignment.rollouts):
            raise PlanError(
                f"run_group played rollouts {sorted(played)} of group {assignment.group_id}; it must play each of "
                f"{sorted(assignment.rollouts)} once"
            )

    def review(self, request: ReviewRequest) -> tuple[Verdict, bool]:
        """What becomes of a group, and whether weights are to be asked for anew. A group is reviewed once, however often it is asked about.

        Raises:
            PlanError: the answer is no verdict, or speaks of rollouts that the group has not.
        """
        with self._lock:
            if (known := self._verdicts.get(request.group_id)) is not None:
                return known, False
        task = self.task_of(request.task)
        verdict = Verdict()
        if self._reviews:
            verdict = checked(self.plan.review(replace(request, task=task)), request)
        with self._lock:
            self._verdicts[request.group_id] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        self._remember(request)
        every = self.plan.reweigh_every
        return verdict, self._weighs and every > 0 and self.plan.history.groups % every == 0

    def _remember(self, request: ReviewRequest) -> None:
        if (index := self._index_of(request.task)) is not None:
            self.plan.history.add(index, request.group_id, [rollout.reward for rollout in request.rollouts])

    def _index_of(self, task: Task | int) -> int | None:
        """Tasks that the service read from a file come as themselves."""
        if isinstance(task, int):
            return task
        if self._indices is None:
            self._indices = {} if self.count is None else {self.source[at].id: at for at in range(self.count)}
        return self._indices.get(task.id)

    def _weights(self) -> tuple[float, ...] | None:
        given = self.plan.weights() if self._weighs else None
        if given is None:
            return None
        weights = tuple(float(weight) for weight in given)
        if len(weights) != self.count:
            raise PlanError(f"weights gave {len(weights)} numbers for {self.count} tasks: it must give one for each")
        if bad := [weight for weight in weights if not (math.isfinite(weight) and weight >= 0)]:
            raise PlanError(f"weights gave {bad[0]}: a weight is a number of at least 0")
        if not any(weights):
            raise PlanError("weights gave 0 for every task: no task would be drawn")
        return weights


def checked(verdict: Verdict | None, request: ReviewRequest) -> Verdict:
    """A reviewer's answer; None keeps the group as it is.

    Raises:
        PlanError: it is no verdict, or speaks of rollouts that the group has not, or a reward is no number.
    """
    if verdict is None:
        return Verdict()
    if not isinstance(verdict, Verdict):
        raise PlanError(
            f"review gave {type(verdict).__name__}: it must give a palestra.agents.types.Verdict, or None to keep the group"
        )
    if unknown := verdict.rewards.keys() - {rollout.index for rollout in request.rollouts}:
        raise PlanError(f"review gave a reward to rollout {min(unknown)}, which group {request.group_id} does not have")
    check_rewards(verdict.rewards.values(), "review")
    return verdict


def check_rewards(rewards: Iterable[float | None], who: str) -> None:
    """Raises:
    PlanError: one is neither a finite number nor None.
    """
    for reward in rewards:
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise PlanError(f"{who} gave the reward {reward!r}: it must be a number, or None where it is unknown")
