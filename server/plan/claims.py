"""What the trainer gets when it asks for groups: not older than the bound, and no more masked than must be.

In: the buffer, the steps, the budget. Out: groups under a lease, or none: then the caller waits and asks again. It waits for the buffer
alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from palestra.server.buffer.types import RunBuffer
from palestra.server.plan.budget import StepBudget
from palestra.server.plan.metrics import RolloutMetrics
from palestra.server.plan.types import PlanSettings
from palestra.server.rows import mask_versions
from palestra.server.types import TrajectoryGroup

STALE = "stale"


class Claims:
    """Decides about claims."""

    def __init__(self, settings: PlanSettings, buffer: RunBuffer, budget: StepBudget, metrics: RolloutMetrics) -> None:
        self.settings, self.buffer, self.budget, self.metrics = settings, buffer, budget, metrics
        self.refunded: Callable[[], None] = lambda: None
        """Called when groups were dropped for their age: there is room for others."""

    async def again(self, claim_id: str, owner: str, ttl_s: float, committed_step: int) -> list[TrajectoryGroup]:
        """What a claim whose reply was lost had given."""
        groups = await asyncio.to_thread(self.buffer.reclaim, claim_id, owner, ttl_s)
        return await self._masked(groups, committed_step)

    async def take(
        self, n: int, owner: str, ttl_s: float, committed_step: int, claim_id: str | None = None
    ) -> list[TrajectoryGroup]:
        """`n` groups; fewer, down to the least that the run wants, where the step's budget is spent; else none.

        Groups beyond the bound are dropped first, or their tokens beyond it masked, as the run says.
        """
        await self._drop_stale(committed_step)
        least = min(n, self.settings.least)
        while (ready := await asyncio.to_thread(self.buffer.ready_count)) >= n or (
            ready >= least and self.budget.spent
        ):
            got = await asyncio.to_thread(self.buffer.claim, n, owner, ttl_s, claim_id=claim_id)
            groups = await self._masked(got, committed_step)
            if len(groups) == n or (len(groups) >= least and self.budget.spent):
                self.metrics.forget_lengths(group.group_id for group in groups)
                return groups
            # Masks left nothing to train of some, or another claim came first: the rest goes back, in its old order, and it is tried again.
            await asyncio.to_thread(self.buffer.release, [group.group_id for group in groups], owner)
            if len(got) == len(groups):
                break
        return []

    async def _drop_stale(self, committed_step: int) -> None:
        settings = self.settings
        stale = await asyncio.to_thread(
            self.buffer.drop_older_than, committed_step, settings.staleness, newest=settings.mask_old
        )
        if stale:
            self.metrics.add_stale(stale)
            self.refunded()

    async def _masked(self, groups: list[TrajectoryGroup], committed_step: int) -> list[TrajectoryGroup]:
        """The groups with what must not be trained masked. Their counts are noted even where nothing was: after a restore less may be too
        old than before."""
        if not (groups and (self.settings.mask_old or self.settings.mask_earlier)):
            return groups
        versions = {span.version for group in groups for row in group.samples for span in row.spans}
        step_of = {version: await asyncio.to_thread(self.buffer.train_step_of, version) for version in versions}
        oldest = committed_step - self.settings.staleness if self.settings.mask_old else None

        def too_old(version: int, newest: int) -> bool:
            beyond = oldest is not None and step_of[version] < oldest
            return beyond or (self.settings.mask_earlier and version < newest)

        out: list[TrajectoryGroup] = []
        for group in groups:
            masked, lengths = mask_versions(group, too_old)
            self.metrics.add_masked(lengths)
            if any(row.loss_mask.any() for row in masked.samples):
                out.append(masked)
                continue
            await asyncio.to_thread(self.buffer.recount, [masked])
            await asyncio.to_thread(self.buffer.drop, [group.group_id], STALE)
            self.metrics.add_stale([group.group_id])
            self.refunded()
        await asyncio.to_thread(self.buffer.recount, out)
        return out
