"""A buffer that forgets everything with its process, and its own reader: what `RunBuffer` means, in the fewest words.

The stores are compared with it, step by step, in `tests/buffer_machine.py`.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from palestra.server.buffer.counts import check_group, count_rollouts, versions_of
from palestra.server.buffer.retention import Retention, Shelf, unwanted
from palestra.server.buffer.types import Depth, GroupEntry, RestoreReport, RolloutCounts, VersionRefused
from palestra.server.types import GroupState, LeaseLost, StoreError, TrajectoryGroup

READY, CLAIMED, COMMITTED, DROPPED = GroupState.READY, GroupState.CLAIMED, GroupState.COMMITTED, GroupState.DROPPED


@dataclass
class Held:
    """One group."""

    group: TrajectoryGroup
    counts: tuple[RolloutCounts, ...]
    put_at: float
    stored: bool = True
    state: GroupState = READY
    reason: str | None = None
    owner: str | None = None
    claim_id: str | None = None
    until: float = 0.0
    step: int | None = None
    checkpoint_id: str | None = None
    ended_at: float | None = None
    free_at: float | None = None

    def ready(self) -> None:
        self.state, self.owner, self.claim_id = READY, None, None
        self.step = self.checkpoint_id = self.ended_at = self.free_at = None

    def drop(self, reason: str, now: float) -> None:
        self.ready()
        self.state, self.reason, self.ended_at = DROPPED, reason, now


class MemoryBuffer:
    """Not thread-safe. Groups lie in the order in which they came, each on a shelf of its own."""

    def __init__(self, clock: Callable[[], float] = time.time, retention: Retention = Retention()) -> None:  # noqa: B008
        self._clock, self._retention = clock, retention
        self.held: dict[str, Held] = {}
        self.published: dict[int, tuple[int, bool]] = {}

    def twin(self) -> MemoryBuffer:
        """Another one with the same in it."""
        other = MemoryBuffer(self._clock, self._retention)
        other.held = {name: copy.copy(held) for name, held in self.held.items()}
        other.published = dict(self.published)
        return other

    def close(self) -> None:
        """There is nothing to let go of."""

    def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        for group in groups:
            check_group(group)
        return sum(self._add(group, None if self.descends(versions_of(group)) else "abandoned") for group in groups)

    def put_dropped(self, group: TrajectoryGroup, reason: str) -> bool:
        return self._add(group, reason)

    def claim(self, n: int, owner: str, ttl_s: float, *, claim_id: str | None = None) -> list[TrajectoryGroup]:
        if claim_id is not None and (before := self.reclaim(claim_id, owner, ttl_s)):
            return before
        taken = self._free()[: max(n, 0)]
        for held in taken:
            held.state, held.owner, held.claim_id, held.until = CLAIMED, owner, claim_id, self._clock() + ttl_s
        return [held.group for held in taken]

    def reclaim(self, claim_id: str, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        mine = [held for held in self._claimed(self.held, owner) if held.claim_id == claim_id]
        for held in mine:
            held.until = self._clock() + ttl_s
        return [held.group for held in mine]

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        mine = self._claimed(group_ids, owner)
        for held in mine:
            held.until = self._clock() + ttl_s
        return len(mine)

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        wanted = set(group_ids)
        mine = self._claimed(wanted, owner)
        done = [h for h in self._known(wanted) if (h.state, h.owner, h.step) == (COMMITTED, owner, step)]
        if len(mine) + len(done) < len(wanted):
            raise LeaseLost(f"{owner} no longer holds all of {sorted(wanted)}")
        for held in mine:
            held.state, held.step, held.checkpoint_id, held.ended_at = COMMITTED, step, checkpoint_id, self._clock()
        return len(wanted)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        mine = self._claimed(group_ids, owner)
        for held in mine:
            held.ready()
        return len(mine)

    def drop(self, group_ids: Sequence[str], reason: str) -> int:
        live = [held for held in self._known(group_ids) if held.state in (READY, CLAIMED)]
        for held in live:
            held.drop(reason, self._clock())
        return len(live)

    def recount(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            for held in self._known([group.group_id]):
                if held.state != COMMITTED:
                    held.counts = count_rollouts(group)

    def descends(self, versions: Iterable[int]) -> bool:
        return not any(self.published.get(version, (0, False))[1] for version in versions)

    def dropped(self, reason: str) -> list[str]:
        return [held.group.group_id for held in self.held.values() if (held.state, held.reason) == (DROPPED, reason)]

    def record_publish(self, version: int, train_step: int) -> None:
        if version <= self.highest_version():
            raise VersionRefused(f"{version} is not above {self.highest_version()}")
        self.published[version] = (train_step, False)

    def highest_version(self) -> int:
        return max(self.published, default=-1)

    def train_step_of(self, version: int) -> int:
        known = [published for published in self.published if published <= version]
        return self.published[max(known)][0] if known else 0

    def restore(self, train_step: int, policy_version: int) -> RestoreReport:
        lost, again = [], []
        for name, held in self.held.items():
            later = held.state == COMMITTED and (held.step or 0) > train_step
            if not later and held.state not in (READY, CLAIMED):
                continue
            if any(self._beyond(version, train_step, policy_version) for version in versions_of(held.group)):
                lost.append(name)
            elif held.state != READY:
                again.append(name)
        if missing := [name for name in again if not self.held[name].stored]:
            raise StoreError(f"{missing} are not stored any more")
        for name in lost:
            self.held[name].drop("abandoned", self._clock())
        for name in again:
            self.held[name].ready()
        for version, (step, gone) in self.published.items():
            self.published[version] = (step, gone or (version > policy_version and step > train_step))
        return RestoreReport(tuple(again), tuple(lost), self.highest_version() + 1)

    def drop_older_than(self, train_step_now: int, max_staleness: int, *, newest: bool = False) -> list[str]:
        pick, names = max if newest else min, []
        for held in self._free():
            steps = [self.train_step_of(version) for version in versions_of(held.group)]
            if steps and train_step_now - pick(steps) > max_staleness:
                held.drop("stale", self._clock())
                names.append(held.group.group_id)
        return names

    def ready_count(self) -> int:
        return len(self._free())

    def counts(self) -> dict[str, int]:
        ready = len(self._free())
        states = Counter(held.state for held in self.held.values())
        live = {"ready": ready, "claimed": states[READY] + states[CLAIMED] - ready}
        reasons = Counter(f"dropped({held.reason})" for held in self.held.values() if held.state == DROPPED)
        return {**live, "committed": states[COMMITTED], "dropped": states[DROPPED], **reasons}

    def depths(self) -> dict[str, Depth]:
        free = {id(held) for held in self._free()}
        ages: dict[str, list[float]] = {"ready": [], "claimed": []}
        for held in self.held.values():
            if held.state in (READY, CLAIMED):
                ages["ready" if id(held) in free else "claimed"].append(self._clock() - held.put_at)
        return {
            state: Depth(len(each), max(each, default=0.0), sum(each) / len(each) if each else 0.0)
            for state, each in ages.items()
        }

    def collect(self, oldest_kept_train_step: int) -> list[str]:
        for held in self.held.values():
            trained = held.state == COMMITTED and (held.step or 0) <= oldest_kept_train_step
            if held.stored and held.free_at is None and (trained or held.state == DROPPED):
                held.free_at = self._clock()
        shelves = [Shelf(name, 1, held.free_at) for name, held in self.held.items() if held.stored]
        names = unwanted(shelves, self._retention, self._clock())
        for name in names:
            self.held[name].stored = False
        return names

    def entries(self) -> tuple[GroupEntry, ...]:
        return tuple(
            GroupEntry(
                group_id=name,
                task_id=held.group.task_id,
                group_size=held.group.group_size,
                state=held.state,
                reason=held.reason,
                step=held.step,
                checkpoint_id=held.checkpoint_id,
                owner=held.owner,
                versions=tuple(versions_of(held.group)),
                rollouts=held.counts,
                put_at=held.put_at,
                ended_at=held.ended_at,
                shelf=name if held.stored else None,
                stored_bytes=1 if held.stored else 0,
                free_at=held.free_at,
            )
            for name, held in self.held.items()
        )

    def read_group(self, group_id: str) -> TrajectoryGroup:
        if group_id not in self.held or not self.held[group_id].stored:
            raise StoreError(f"no rows of {group_id}")
        return self.held[group_id].group

    def publishes(self) -> tuple[tuple[int, int, bool], ...]:
        return tuple((version, *self.published[version]) for version in sorted(self.published))

    def _add(self, group: TrajectoryGroup, reason: str | None) -> bool:
        if group.group_id in self.held:
            return False
        held = Held(group, count_rollouts(group), self._clock(), stored=reason is None)
        if reason is not None:
            held.drop(reason, self._clock())
        self.held[group.group_id] = held
        return True

    def _free(self) -> list[Held]:
        """What could be claimed."""
        now = self._clock()
        return [h for h in self.held.values() if h.state == READY or (h.state == CLAIMED and h.until <= now)]

    def _known(self, group_ids: Iterable[str]) -> list[Held]:
        return [self.held[name] for name in sorted(set(group_ids)) if name in self.held]

    def _claimed(self, group_ids: Iterable[str], owner: str) -> list[Held]:
        wanted = set(group_ids)
        mine = [held for name, held in self.held.items() if name in wanted]
        return [held for held in mine if (held.state, held.owner) == (CLAIMED, owner)]

    def _beyond(self, version: int, train_step: int, policy_version: int) -> bool:
        """Whether a run restored to `train_step` never had these weights."""
        step, abandoned = self.published.get(version, (train_step + 1, False))
        return abandoned or (version > policy_version and step > train_step)
