"""How many groups may be opened now. One formula for sync, one-step-off and async; pure."""

from __future__ import annotations

import math

from palestra.server.plan.types import Load, PlanSettings


def capacity(load: Load, settings: PlanSettings, *, committed_step: int, published_step: int) -> int:
    """Groups that may be opened so that none is older than the bound when it is trained.

    With weights of step p published, groups for steps p+1 .. p+1+ahead may exist. Those of steps up to `committed_step` are done, so
    (1 + ahead - (committed - published)) batches are left to hold, minus what is already there: dropped and failed groups are there no
    longer, so their places are free again. A sync run therefore opens nothing between the commit of a step and the publish of its weights.
    No more is opened than the steps up to the last will train, and no more rollouts than `max_in_flight`.

    This is the staleness admission of AReaL (arXiv 2505.24298, section 5.1) with one batch per train step, counted in groups.
    """
    ahead = settings.staleness if settings.ahead is None else settings.ahead
    batches = max(0, 1 + ahead - (committed_step - published_step))
    window = math.ceil(batches * settings.groups_per_step * settings.oversample)
    wanted = math.ceil((settings.last_step - committed_step) * settings.groups_per_step * settings.oversample)
    room = min(window, wanted) - load.total
    if settings.max_in_flight is not None:
        room = min(room, (settings.max_in_flight - load.unfinished) // settings.group_size)
    return max(0, room)
