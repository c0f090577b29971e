"""The plan of a run: opens groups as the schedule allows, gathers their rollouts, and hands complete groups to the buffer.

In: workers that ask for work, sessions that end, verdicts of the run's own program, commits and publishes of the trainer. Out: work for
workers, groups in the buffer, or dropped with a reason that is counted, and groups for the trainer. It waits for the store and the buffer
only. What survives a crash is in the turn log and the buffer; `recover` and the first `take` rebuild the rest from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from palestra.agents.types import Verdict
from palestra.envs.types import StopReason
from palestra.server.buffer.types import RunBuffer
from palestra.server.plan.admission import capacity
from palestra.server.plan.book import GroupBook
from palestra.server.plan.budget import StepBudget
from palestra.server.plan.claims import Claims
from palestra.server.plan.finishing import Finisher
from palestra.server.plan.metrics import RolloutMetrics
from palestra.server.plan.names import draw_of, name_of, owed
from palestra.server.plan.order import TaskOrder
from palestra.server.plan.outside import OutsideGroups
from palestra.server.plan.recovery import ABANDONED, Recovery
from palestra.server.plan.reviews import Reviews, review_of
from palestra.server.plan.types import Assignment, Load, OpenGroup, PlanLog, PlanSettings, Work, WorkerFacts
from palestra.server.signal import Signal
from palestra.server.store.types import GroupRecord, SessionOutcome, SessionRecord
from palestra.server.types import GroupState, SessionError, TrajectoryGroup, Turn

UNREVIEWED = "unreviewed"
"""Why a group is dropped of which the run's own program never said anything."""


class Plan:
    """One run's source of work."""

    def __init__(
        self,
        settings: PlanSettings,
        log: PlanLog,
        buffer: RunBuffer,
        signal: Signal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.log, self.buffer, self.signal = settings, log, buffer, signal
        self.book = GroupBook(settings.retries, clock)
        self.metrics = RolloutMetrics(clock)
        self.outside = OutsideGroups(self.book, log, clock)
        self.reviews = Reviews(clock)
        self.budget = StepBudget(settings.budget_s, settings.budget_tokens, clock)
        self.claims = Claims(settings, buffer, self.budget, self.metrics)
        self.claims.refunded = signal.notify
        self.facts: WorkerFacts | None = None
        """What workers said; None before the first one came."""
        self.tasks: Sequence[Mapping[str, Any]] | None = None
        """The tasks themselves where a file gave them; None: workers know their tasks by index."""
        self.order: TaskOrder | None = None
        self.committed_step = 0
        self.published_step: int | None = None
        """Train step whose weights the engines have; None before this process saw a publish: nothing is opened until then."""
        self._finisher = Finisher(settings, log, buffer)
        self._recovered: list[GroupRecord] = []
        """Open groups on record that are placed once it is known what workers have."""
        self._placing, self._opening = asyncio.Lock(), asyncio.Lock()
        self._draws = 0

    # What workers and files say of tasks.

    def register(self, facts: WorkerFacts) -> None:
        """A worker says what it has; said again, its weights count from now on.

        Raises:
            ValueError: it has another number of tasks than another one, or weights that fit none.
        """
        if self.tasks is None:
            self._count(facts.tasks)
        assert self.order is not None, "tasks are counted by now"
        if facts.weights is not None:
            self.order.weigh(facts.weights)
        self.facts = facts
        self.signal.notify()

    def set_tasks(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Tasks that the service holds itself.

        Raises:
            ValueError: there are none.
        """
        self.tasks = tasks
        self._count(len(tasks))

    def _count(self, count: int | None) -> None:
        if self.order is None or (self.order.count is None and count is not None):
            self.order = TaskOrder(count, shuffle=self.settings.shuffle, seed=self.settings.seed)
        elif self.order.count != count:
            raise ValueError(
                f"a worker reports {count} tasks, another reported {self.order.count}: environments differ"
            )

    # A restart.

    async def recover(self) -> None:
        """After a restart: complete groups are handed on, outside ones go on, and the plan's own are placed by the first `take`."""
        groups = self.log.reader.read_groups()
        self._draws = 1 + max((found[0] for group in groups if (found := draw_of(group.group_id))), default=-1)
        for record in groups:
            if record.state is not GroupState.OPEN:
                continue
            sessions = self.log.reader.read_sessions(group_id=record.group_id)
            if any(session.record.meta.get("external") for session in sessions):
                group = self.outside.readopt(record, sessions)
                if group.complete:
                    await self._finish(group)
            else:
                self._recovered.append(record)

    async def _place_recovered(self) -> None:
        """Open groups of a former process go on, and tasks whose groups were abandoned are owed again."""
        async with self._placing:
            facts = self.facts or WorkerFacts(None)
            recovery = Recovery(self.log, self.buffer, self.settings.retries)
            while self._recovered:
                record = self._recovered[0]
                whole = self.settings.program == "function"
                found = await recovery.find(record, deterministic=facts.deterministic, whole=whole)
                self.book.reopen(found.group, found.again, found.replay)
                self._recovered.pop(0)
                if found.group.complete:
                    await self._settle(found.group)

    async def restored(self, train_step: int) -> None:
        """A trainer starts from `train_step`; the buffer was restored to it. Tasks of groups that were abandoned are owed."""
        self.committed_step, self.published_step = train_step, None
        lost = await asyncio.to_thread(self.buffer.dropped, ABANDONED)
        for draw, life in owed(lost, [group.group_id for group in self.log.reader.read_groups()]):
            await self._owe(draw, life)

    async def _owe(self, draw: int, life: int) -> None:
        """The task of a lost group, under a new name. Repeating it changes nothing."""
        before = self.log.reader.read_groups(group_id=name_of(draw, life - 1))
        record = GroupRecord(name_of(draw, life), before[0].task, before[0].seed, before[0].size)
        if await self.log.put_group(record):
            self.book.open(record.group_id, record.task, record.seed, record.size)

    # The schedule.

    async def load(self) -> Load:
        """Groups that are not finished with."""
        depths = await asyncio.to_thread(self.buffer.depths)
        return Load(
            sum(not group.outside for group in self.book.groups.values()) + len(self._recovered),
            depths["ready"].groups,
            depths["claimed"].groups,
            self.book.unfinished(),
        )

    async def room(self) -> int:
        """Groups that may be opened now."""
        load = await self.load()
        if self.order is None or self.published_step is None:
            return 0
        return capacity(load, self.settings, committed_step=self.committed_step, published_step=self.published_step)

    def committed(self, step: int) -> None:
        """The trainer is about to commit this step, or failed to: then the one before."""
        self.committed_step = step
        self.signal.notify()

    def published(self, step: int) -> None:
        """Engines have the weights of this step: generation for the next one begins."""
        self.published_step = step
        self.budget.begin()
        self.signal.notify()

    def add_turn(self, turn: Turn) -> None:
        """A model call was recorded."""
        self.metrics.add_turn(turn)
        before = self.budget.spent
        self.budget.add(len(turn.completion_ids))
        if self.budget.spent and not before:
            self.signal.notify()

    async def claim(self, n: int, owner: str, ttl_s: float, claim_id: str | None = None) -> list[TrajectoryGroup]:
        """Groups for the trainer, or none for now; see `Claims.take`."""
        return await self.claims.take(n, owner, ttl_s, self.committed_step, claim_id)

    # Work.

    async def take(self, *, reviews_only: bool = False) -> Work | None:
        """The next work for a worker; None where the schedule allows none now. `reviews_only`: it has no place for rollouts."""
        if self.published_step is None:
            return None
        if self._recovered or self._placing.locked():
            await self._place_recovered()
        if (review := self.reviews.take()) is not None:
            return review
        if reviews_only:
            return None
        if (waiting := self.book.take()) is not None:
            return waiting
        async with self._opening:  # two that look at once would both find the last place
            return await self._open_next() if await self.room() >= 1 else None

    async def _open_next(self) -> Assignment | None:
        assert self.order is not None, "there is room only once tasks are counted"
        draw, self._draws = self._draws, self._draws + 1
        index = self.order.index(draw)
        task: Any = dict(self.tasks[index]) if self.tasks is not None else index
        seed = int(np.random.SeedSequence([self.settings.seed, draw]).generate_state(1)[0]) & 0x7FFFFFFF
        group_id = name_of(draw)
        self.book.open(group_id, task, seed, self.settings.group_size)
        assignment = self.book.take()
        await self.log.put_group(GroupRecord(group_id, task, seed, self.settings.group_size))
        return assignment

    def is_planned(self, group_id: str) -> bool:
        """Whether the plan itself opened this group."""
        group = self.book.groups.get(group_id)
        return group is not None and not group.outside

    async def expire(self) -> list[tuple[str, int]]:
        """Gives up rollouts whose worker never came back: a fault, played again while retries are left. Groups that the run's own program
        forgot are dropped. Returns (rollout id, attempt) of the rollouts."""
        # Outside sessions have deadlines of their own.
        lost = [entry for entry in self.book.overdue(self.settings.rollout_deadline_s) if self.is_planned(entry[0])]
        replay = self.facts is not None and self.facts.deterministic and self.settings.program != "function"
        lost = [entry for entry in lost if not (replay and self.book.hand_out_again(*entry[:2]))]
        for group_id, index, attempt in lost:
            error = f"no worker ended it within {self.settings.rollout_deadline_s:.0f} s"
            await self._end(group_id, index, attempt, SessionOutcome(None, stop_reason=StopReason.INFRA, error=error))
        for group_id in self.reviews.overdue(self.settings.rollout_deadline_s):
            await self.judge(group_id, Verdict(keep=False, reason=UNREVIEWED))
        return [(f"{group_id}-{index}", attempt) for group_id, index, attempt in lost]

    async def _end(self, group_id: str, index: int, attempt: int, outcome: SessionOutcome) -> None:
        """Ends a rollout that may never have had a session."""
        task_id = self.book.groups[group_id].task_id
        await self.ended(SessionRecord(f"{group_id}-{index}", attempt, group_id, task_id, index), outcome)

    async def ended(self, record: SessionRecord, outcome: SessionOutcome) -> None:
        """A session of a group was closed."""
        group = self.book.ended(record.group_id, record.index, record.attempt, outcome)
        if group is not None:
            group.task_id = record.task_id
            await self._settle(group)
        self.signal.notify()

    # What becomes of a group.

    async def judge(self, group_id: str, verdict: Verdict) -> list[tuple[str, int]]:
        """What the run's own program says of a group. Returns (rollout id, attempt) of its rollouts that go on: they are to be ended
        (`give_up`), and the last end settles the group. A verdict that is repeated changes nothing.

        Raises:
            SessionError: 404 for a group that never was, 400 for a reward of a rollout that is none.
        """
        group = self.reviews.find(group_id)
        if group is not None:
            _check_verdict(verdict, len(group.slots))
            self.reviews.answered(group_id)
            group.verdict = verdict
            await self._finish(group)
            return []
        group = self.book.groups.get(group_id)
        if group is None or group.outside:
            if draw_of(group_id) is None or not self.log.reader.read_groups(group_id=group_id):
                raise SessionError(f"no group {group_id} of this run", 404, "not_found")
            return []
        _check_verdict(verdict, len(group.slots))
        group.verdict = verdict
        return [(f"{group_id}-{slot.index}", slot.attempt) for slot in group.slots if slot.outcome is None]

    async def give_up(self, group_id: str, rollout_id: str, attempt: int, reason: str) -> None:
        """Ends a rollout that has no session."""
        index = int(rollout_id.rsplit("-", 1)[1])
        await self._end(group_id, index, attempt, SessionOutcome(None, stop_reason=reason))

    async def _settle(self, group: OpenGroup) -> None:
        """A group became complete: the run's own program is asked, where there is one; else it is finished."""
        program = "none" if group.outside or group.verdict is not None else self.settings.program
        if program == "function":
            self.reviews.add(group, None)
        elif program == "plan" and (self.facts is None or self.facts.reviews):
            sessions = await asyncio.to_thread(self.log.reader.read_sessions, group_id=group.group_id)
            self.reviews.add(group, review_of(group, list(sessions)))
        else:
            await self._finish(group)
        self.signal.notify()

    async def _finish(self, group: OpenGroup) -> None:
        """Rows, filter, buffer."""
        complete, outcomes = await self._finisher.rows(group)
        versions = {span.version for row in complete.samples for span in row.spans}
        found = draw_of(group.group_id)
        if found is not None and not await asyncio.to_thread(self.buffer.descends, versions):
            await self._owe(found[0], found[1] + 1)  # first: a crash in between finishes this group again
        reason = self._finisher.reason(group, complete, outcomes)
        await self._finisher.store(complete, reason)
        if reason is None:
            self.metrics.keep_lengths(complete)
        self.metrics.add_group([outcome for outcome in outcomes if outcome is not None], reason)
        self.book.close(group.group_id)
        self.signal.notify()


def _check_verdict(verdict: Verdict, size: int) -> None:
    if wrong := sorted(index for index in verdict.rewards if not 0 <= index < size):
        raise SessionError(f"rewards: rollout {wrong[0]} is not within a group of {size}")
