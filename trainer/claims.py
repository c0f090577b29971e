"""How the trainer gets the groups of a step.

In: the service. Out: groups under a lease. It waits for the service to have them, at most `wait_s`, asking `stop` in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from palestra.server.types import LeaseLost, TrajectoryGroup
from palestra.trainer.checkpoints import Checkpoint
from palestra.trainer.settings import TrainerSettings
from palestra.trainer.types import RolloutService, TrainerError

CLAIM_S = 2.0
"""How long one call of `claim` waits, so that a wish to stop is seen, seconds."""


class Claims:
    """Claims of one trainer, which may hold groups in its weights that are not committed."""

    def __init__(self, service: RolloutService, settings: TrainerSettings, stop: Callable[[], bool]) -> None:
        self._service, self._settings, self._stop = service, settings, stop
        self._from: Checkpoint | None = None
        self._trained: set[str] = set()
        """Groups that the checkpoint `_from` holds but that were not committed: they are somewhere in the queue again."""

    def settle(self, checkpoint: Checkpoint) -> None:
        """Commits the groups of the step that a checkpoint was saved in, for a trainer that was killed before it could. It comes before the
        restore, which takes all claims back. Groups that were taken back already are committed when they are claimed again."""
        ids = checkpoint.meta.group_ids
        if ids and not self._commit(checkpoint, ids):
            self._from, self._trained = checkpoint, set(ids)

    def _commit(self, checkpoint: Checkpoint, group_ids: Sequence[str]) -> bool:
        try:
            self._service.commit(checkpoint.meta.train_step, checkpoint.id, group_ids, self._settings.owner)
        except LeaseLost:
            return False
        return True

    def step(self, number: int) -> list[TrajectoryGroup]:
        """The groups of step `number`: a whole batch, or what the service gives of one when the step's budget is spent or the tasks are at
        their end. None where nothing comes any more, or where `stop` came first.

        Raises:
            TrainerError: nothing came in time; says who was waited for.
        """
        wanted, deadline = self._settings.algo.groups_per_step, time.monotonic() + self._settings.wait_s
        groups: list[TrajectoryGroup] = []
        while len(groups) < wanted:
            asked = wanted - len(groups)
            got = self._some(asked, deadline, number)
            if got is None:
                self._service.release([group.group_id for group in groups], self._settings.owner)
                return []
            groups += self._untrained(got)
            # A short answer is the batch, unless all of it was trained before the restart: then the step has nothing yet.
            if not got or (groups and len(got) < asked):
                break
        return groups

    def _untrained(self, got: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Those that the weights have not seen; the others are committed to the step that trained them."""
        seen = [group.group_id for group in got if group.group_id in self._trained]
        if seen and self._from is not None:
            self._service.commit(self._from.meta.train_step, self._from.id, seen, self._settings.owner)
            self._trained.difference_update(seen)
        return [group for group in got if group.group_id not in seen]

    def _some(self, wanted: int, deadline: float, number: int) -> list[TrajectoryGroup] | None:
        """At most `wanted` groups; None where `stop` came first."""
        owner, lease = self._settings.owner, self._settings.lease_s
        while not self._stop():
            try:
                wait = min(CLAIM_S, max(0.1, deadline - time.monotonic()))
                return self._service.claim(wanted, owner, lease, wait)
            except TimeoutError as error:
                if time.monotonic() > deadline:
                    waited = self._settings.wait_s
                    raise TrainerError(f"step {number} waited {waited:.0f} s for groups: {error}") from error
        return None
