"""Plays groups as the run's plan says: a thread per group and per review, episodes in threads of their own.

In: work of the service. Out: episodes, refusals and verdicts. It waits for work with bounded long polls, and for groups only to have room
for others; reviews are answered also where there is none. A fault of the plan's own ends the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from palestra.agents.group import EpisodeThreads, Players, run_group
from palestra.agents.plans.driver import PlanDriver
from palestra.agents.types import GroupAssignment, Limits, ReviewRequest
from palestra.cli.roles.plays.service import WorkerService
from palestra.envs.types import Episode

WAIT_S = 2.0
"""How long one call waits for work."""
FULL_S = 0.05
"""How long a worker that has no room waits for some before it looks again."""
REVIEW_S = 0.2
"""How long it waits for a review meanwhile, where groups are reviewed."""


class GroupWorker:
    """Plays assignments until it is told to stop."""

    def __init__(
        self,
        service: WorkerService,
        driver: PlanDriver,
        players: Players,
        limits: Limits,
        *,
        group_size: int,
        concurrency: int,
        deterministic: bool,
        stopping: threading.Event,
    ) -> None:
        """`concurrency`: episodes at a time. `deterministic`: whether the environment says so of itself."""
        self.service, self.driver, self.players, self.limits = service, driver, players, limits
        self.deterministic, self.stopping = deterministic, stopping
        self.threads = EpisodeThreads(concurrency)
        self.groups_at_once = max(1, -(-concurrency // group_size))
        self._groups: set[threading.Thread] = set()
        self._reviews = False
        self._fault: BaseException | None = None

    def register(self) -> None:
        """Tells the service which tasks there are, and how they are drawn.

        Raises:
            PlanError: the plan's weights are none.
            ServiceError: the service refuses it: another worker has another number of tasks.
        """
        said = self.driver.registration()
        self._reviews = said.reviews
        self.service.client.register_worker(
            said.tasks, weights=said.weights, reviews=said.reviews, deterministic=self.deterministic
        )

    def run(self) -> None:
        """Takes work while there is room for another group.

        Raises:
            ServiceError: the service was gone for too long.
            Exception: whatever the plan raised.
        """
        while not self.stopping.is_set():
            if self._fault is not None:
                raise self._fault
            self._groups = {thread for thread in self._groups if thread.is_alive()}
            full = len(self._groups) >= self.groups_at_once
            if full:
                next(iter(self._groups)).join(FULL_S)
                if not self._reviews:
                    continue
            work = self.service.ask(REVIEW_S if full else WAIT_S, reviews_only=full)
            if isinstance(work, ReviewRequest):
                self._start(lambda review=work: self._review(review), f"review-{work.group_id}")  # type: ignore[misc]
            elif work is not None:
                self._groups.add(self._start(lambda given=work: self._play(given), work.group_id))  # type: ignore[misc]

    def status(self) -> dict[str, object]:
        """For /health."""
        return {"status": "ok", "groups": len(self._groups)}

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                self._fault = error

        thread = threading.Thread(target=guarded, daemon=True, name=name)
        thread.start()
        return thread

    def _play(self, assignment: GroupAssignment) -> None:
        if (reason := self.driver.refusal(assignment)) is not None:
            self.service.skip(assignment.group_id, reason)
            return
        self.driver.run(self.driver.resolve(assignment), self._play_part)

    def _play_part(self, assignment: GroupAssignment) -> list[Episode]:
        return run_group(assignment, self.players, self.service, self.limits, self.threads)

    def _review(self, request: ReviewRequest) -> None:
        verdict, reweigh = self.driver.review(request)
        self.service.verdict(request.group_id, verdict)
        if reweigh:
            self.register()
