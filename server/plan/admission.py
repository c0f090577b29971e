"""How many groups may be opened now. One formula for sync, one-step-off and async; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Where the groups that are not finished with are."""

    open: int
    ready: int
    claimed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.open + self.ready + self.claimed


def capacity(
    load: Load, *, groups_per_step: int, staleness: int, committed_step: int, published_step: int, last_step: int
) -> int:
    """Groups that may be opened so that none is older than `staleness` train steps when it is trained.

    With weights of step p published, groups for steps p+1 .. p+1+staleness may exist. Those of steps up to `committed_step` are done, so
    (1 + staleness - (committed - published)) batches are left to hold, minus what is already there. A sync run therefore opens nothing
    between the commit of a step and the publish of its weights. No more is opened than the steps up to `last_step` will train.
    """
    lag = committed_step - published_step
    window = (1 + staleness - lag) * groups_per_step
    wanted = (last_step - committed_step) * groups_per_step
    return max(0, min(window, wanted) - load.total)
