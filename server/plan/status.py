"""What the plan says of itself: queues by state and age, and who waits for whom.

In: the plan. Out: figures and a sentence. It waits for the buffer.
"""

from __future__ import annotations

import asyncio
import time

from palestra.server.plan.plan import Plan
from palestra.server.plan.types import Load


async def queue_figures(plan: Plan) -> dict[str, float]:
    """`buffer/STATE/groups`, `age_mean_s` and `age_max_s`: how many groups are open, ready and claimed, and since when."""
    depths = await asyncio.to_thread(plan.buffer.depths)
    out = {}
    for state, depth in depths.items():
        out[f"buffer/{state}/groups"] = float(depth.groups)
        out[f"buffer/{state}/age_mean_s"] = depth.mean_s
        out[f"buffer/{state}/age_max_s"] = depth.oldest_s
    ages = plan.book.ages()
    out["buffer/open/groups"] = float(len(ages))
    out["buffer/open/age_mean_s"] = sum(ages) / len(ages) if ages else 0.0
    out["buffer/open/age_max_s"] = max(ages, default=0.0)
    return out


def waits(plan: Plan, load: Load, trainer: tuple[float, int] | None) -> str:
    """One sentence: law 7 wants every wait to have a name. `trainer`: since when (time.monotonic) it waits for how many groups."""
    oldest = plan.book.oldest_running()
    who = f"; oldest rollout {oldest['rollout_id']} for {oldest['seconds']:.0f} s" if oldest else ""
    if trainer is not None:
        since, n = trainer
        return f"trainer waits {time.monotonic() - since:.0f} s for {max(n - load.ready, 0)} of {n} groups{who}"
    if plan.published_step is None:
        return "workers wait for the trainer's first publish"
    if not plan.book.groups:
        return "workers wait for the trainer"
    if len(plan.reviews) == load.open:
        return f"{len(plan.reviews)} complete groups wait for the run's own program"
    return f"{plan.book.running()} rollouts go on{who}"
