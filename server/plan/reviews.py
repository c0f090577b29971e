"""Complete groups that wait for a word of the run's own program. In memory; after a restart they are complete again, and asked about again.

In: complete groups, verdicts. Out: reviews for workers, handed out again where no answer came in time. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palestra.agents.types import PlayedRollout
from palestra.server.plan.types import OpenGroup, Review
from palestra.server.store.types import StoredSession

ANSWER_S = 120.0
"""How long a worker may take for a review before another is asked, seconds."""


@dataclass(slots=True)
class _Waiting:
    group: OpenGroup
    review: Review | None
    """None: the program gives its verdict without being asked."""
    since: float
    asked_at: float | None = None


class Reviews:
    """The groups that wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: OpenGroup, review: Review | None) -> None:
        """A group that became complete."""
        self._waiting[group.group_id] = _Waiting(group, review, self._clock())

    def take(self) -> Review | None:
        """The oldest review that nobody is asked for at present."""
        now = self._clock()
        for waiting in self._waiting.values():
            if waiting.review is not None and (waiting.asked_at is None or now - waiting.asked_at > ANSWER_S):
                waiting.asked_at = now
                return waiting.review
        return None

    def find(self, group_id: str) -> OpenGroup | None:
        """The group that a verdict is of; None where it does not wait."""
        waiting = self._waiting.get(group_id)
        return None if waiting is None else waiting.group

    def answered(self, group_id: str) -> None:
        """It has its verdict."""
        del self._waiting[group_id]

    def overdue(self, seconds: float) -> list[str]:
        """Groups that have waited for longer."""
        now = self._clock()
        return [group_id for group_id, waiting in self._waiting.items() if now - waiting.since > seconds]


def review_of(group: OpenGroup, sessions: list[StoredSession]) -> Review:
    """What a reviewer sees: the attempts that count, by index."""
    counted = {(slot.index, slot.attempt): slot for slot in group.slots}
    played = []
    for session in sessions:
        slot = counted.get((session.record.index, session.record.attempt))
        if slot is None or slot.outcome is None:
            continue
        outcome = slot.outcome
        played.append(
            PlayedRollout(
                index=slot.index,
                rollout_id=session.record.rollout_id,
                attempt=slot.attempt,
                reward=outcome.reward,
                components=dict(outcome.components),
                stop_reason=outcome.stop_reason,
                truncated=outcome.truncated,
                tokens=session.sampled_tokens,
                turns=session.turns,
            )
        )
    return Review(group.group_id, group.task, tuple(sorted(played, key=lambda rollout: rollout.index)))
