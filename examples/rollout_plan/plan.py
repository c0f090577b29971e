"""A curriculum in a class: tasks that are sometimes solved are drawn most, and long groups count for less.

`rollout.plan` names it. It runs in the worker; whatever it does not override is done as without a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.agents.plans.plan import RolloutPlan
from palestra.agents.types import ReviewRequest, Verdict
from palestra.envs.types import Task

MOST_TOKENS = 120
"""Sampled tokens of a rollout, beyond which each costs a little."""


class Curriculum(RolloutPlan):
    """See the module."""

    reweigh_every = 8

    def weights(self) -> Sequence[float]:
        """1 for a task that is solved half of the time or was never played, less towards always and never."""
        means = self.history.means(self.size or 0, last=4)
        return [1.0 if mean is None else max(0.05, 1.0 - abs(2.0 * mean - 1.0)) for mean in means]

    def accept(self, task: Task) -> bool | str:
        """Only tasks that can be checked."""
        return True if task.answer is not None else "no_answer"

    def review(self, group: ReviewRequest) -> Verdict:
        """Takes a little off the reward of each rollout that is long; drops groups that no rollout solved."""
        rewards = {
            rollout.index: rollout.reward - 0.001 * max(0, rollout.tokens - MOST_TOKENS)
            for rollout in group.rollouts
            if rollout.reward is not None
        }
        if not any(reward > 0 for reward in rewards.values()):
            return Verdict(keep=False, reason="unsolved")
        return Verdict(rewards=rewards)
