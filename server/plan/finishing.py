"""What becomes of a complete group: its rows, the filters, the buffer.

In: a group whose rollouts have all ended, and what the run's own program said of it. Out: a group in the buffer, ready or dropped with a
reason that is counted. It waits for the store and the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from palestra.agents.types import Verdict
from palestra.server.buffer.types import RunBuffer
from palestra.server.plan.filters import drop_reason, filtered
from palestra.server.plan.types import OpenGroup, PlanLog, PlanSettings
from palestra.server.rows import group_of
from palestra.server.store.types import SessionOutcome
from palestra.server.types import GroupState, Trajectory, TrajectoryGroup

MASK = "mask"
"""Kind of the event that keeps a mask made by hand until its group is complete."""
REWARD_REVIEWED = "reward_reviewed"
"""Kind of the event that says which reward the run's own program gave instead."""


class Finisher:
    """Turns complete groups into the buffer's."""

    def __init__(self, settings: PlanSettings, log: PlanLog, buffer: RunBuffer) -> None:
        self.settings, self.log, self.buffer = settings, log, buffer

    async def rows(self, group: OpenGroup) -> tuple[TrajectoryGroup, list[SessionOutcome | None]]:
        """The group's rows and the outcomes that count, with the rewards of its verdict."""
        outcomes = await self._outcomes(group)
        names = await asyncio.to_thread(self._rollout_names, group)
        scored = [slot for slot, outcome in zip(group.slots, outcomes, strict=True) if _reward(outcome) is not None]
        trajectories: list[Trajectory] = []
        masks: dict[str, Any] = {}
        for slot in scored:
            name = names[slot.index]
            found = await asyncio.to_thread(self.log.reader.read_trajectory, name, slot.attempt)
            trajectories.append(replace(found, reward=_reward(outcomes[slot.index])))
            for event in await asyncio.to_thread(self.log.reader.read_events, name):
                if event.kind == MASK and event.attempt == slot.attempt:
                    masks[name] = event.data["masks"]
        complete = group_of(group.group_id, group.task_id, len(group.slots), trajectories, masks=masks)
        return complete, outcomes

    def reason(self, group: OpenGroup, complete: TrajectoryGroup, outcomes: list[SessionOutcome | None]) -> str | None:
        """Why it is dropped; None: it is trained."""
        if group.verdict is not None and not group.verdict.keep:
            return filtered(group.verdict.reason)
        return drop_reason(complete, outcomes, self.settings)

    async def store(self, complete: TrajectoryGroup, reason: str | None) -> None:
        """Into the buffer, and then on record as finished: a crash in between has it stored again, which changes nothing."""
        if reason is None:
            await asyncio.to_thread(self.buffer.put, [complete])
        else:
            await asyncio.to_thread(self.buffer.put_dropped, complete, reason)
        state = GroupState.READY if reason is None else GroupState.DROPPED
        await self.log.update_group(complete.group_id, state=state)

    async def _outcomes(self, group: OpenGroup) -> list[SessionOutcome | None]:
        """As the rollouts ended, but for the rewards that the verdict changes; those are noted."""
        verdict = group.verdict or Verdict()
        outcomes: list[SessionOutcome | None] = []
        for slot in group.slots:
            outcome = slot.outcome
            if outcome is not None and slot.index in verdict.rewards:
                reward = verdict.rewards[slot.index]
                if reward != outcome.reward:
                    data: Mapping[str, Any] = {"reward": reward, "before": outcome.reward}
                    name = f"{group.group_id}-{slot.index}"
                    await self.log.add_event(name, slot.attempt, REWARD_REVIEWED, data)
                outcome = replace(outcome, reward=reward)
            outcomes.append(outcome)
        return outcomes

    def _rollout_names(self, group: OpenGroup) -> dict[int, str]:
        """Index -> rollout id: the plan's own follow from the group's, others are as their opener said."""
        if not group.outside:
            return {slot.index: f"{group.group_id}-{slot.index}" for slot in group.slots}
        sessions = self.log.reader.read_sessions(group_id=group.group_id)
        return {session.record.index: session.record.rollout_id for session in sessions}


def _reward(outcome: SessionOutcome | None) -> float | None:
    return None if outcome is None else outcome.reward
