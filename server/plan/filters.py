"""Why a complete group does not reach the trainer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.server.plan.types import PlanSettings
from palestra.server.store.types import SessionOutcome
from palestra.server.types import TrajectoryGroup

INFRA = "infra"
ZERO_VARIANCE = "zero_variance"
LENGTH = "length"
FILTERED = "filtered"
"""Of a group that the run's own program refused; its own word follows in brackets."""
_EQUAL = 1e-9


def drop_reason(
    group: TrajectoryGroup, outcomes: Sequence[SessionOutcome | None], settings: PlanSettings
) -> str | None:
    """infra: too few of its rollouts have a reward; length: too many were cut by a limit; zero_variance: all rewards are equal, so that
    each one's advantage is 0 (the caller says whether that is so). None: it is trained."""
    if not group.samples or len(group.rewards) < settings.min_group:
        return INFRA
    if settings.drop_zero_variance and len(group.rewards) < 2:
        return INFRA
    scored = [outcome for outcome in outcomes if outcome is not None and outcome.reward is not None]
    cut = sum(outcome.truncated for outcome in scored)
    if scored and cut / len(scored) > settings.max_truncated:
        return LENGTH
    values = list(group.rewards.values())
    if settings.drop_zero_variance and max(values) - min(values) < _EQUAL:
        return ZERO_VARIANCE
    return None


def filtered(reason: str) -> str:
    """The reason on record of a group that the run's own program refused."""
    return f"{FILTERED}({reason})" if reason else FILTERED
