"""A buffer that forgets everything with its process: what the Buffer Protocol means, in the fewest words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.server.types import GroupState, LeaseLost, SampleError, TrajectoryGroup


@dataclass
class _Held:
    group: TrajectoryGroup
    state: GroupState = GroupState.READY
    owner: str = ""
    until: float = 0.0
    step: int = -1


class MemoryBuffer:
    """Not thread-safe. Groups lie in the order in which they came."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}

    def put(self, groups: Sequence[TrajectoryGroup]) -> int:
        for group in groups:
            if not group.samples or {row.group_id for row in group.samples} != {group.group_id}:
                raise SampleError(f"group {group.group_id}: rows of another group, or none")
        fresh = {group.group_id: _Held(group) for group in groups if group.group_id not in self._held}
        self._held.update(fresh)
        return len(fresh)

    def claim(self, n: int, owner: str, ttl_s: float) -> list[TrajectoryGroup]:
        now = self._clock()
        ready = [h for h in self._held.values() if self._state(h, now) == GroupState.READY][: max(n, 0)]
        for held in ready:
            held.state, held.owner, held.until = GroupState.CLAIMED, owner, now + ttl_s
        return [held.group for held in ready]

    def renew(self, group_ids: Sequence[str], owner: str, ttl_s: float) -> int:
        mine = self._claimed(group_ids, owner)
        for held in mine:
            held.until = self._clock() + ttl_s
        return len(mine)

    def commit(self, step: int, checkpoint_id: str, group_ids: Sequence[str], owner: str) -> int:
        ids = set(group_ids)
        mine = self._claimed(list(ids), owner)
        done = [
            h
            for i in ids
            if (h := self._held.get(i)) and (h.state, h.owner, h.step) == (GroupState.COMMITTED, owner, step)
        ]
        if len(mine) + len(done) < len(ids):
            raise LeaseLost(f"{owner} no longer holds all of {sorted(ids)}")
        for held in mine:
            held.state, held.step = GroupState.COMMITTED, step
        return len(ids)

    def release(self, group_ids: Sequence[str], owner: str) -> int:
        mine = self._claimed(group_ids, owner)
        for held in mine:
            held.state, held.owner = GroupState.READY, ""
        return len(mine)

    def drop(self, group_ids: Sequence[str], reason: str) -> int:
        live = [
            h for i in set(group_ids) if (h := self._held.get(i)) and h.state in (GroupState.READY, GroupState.CLAIMED)
        ]
        for held in live:
            held.state = GroupState.DROPPED
        return len(live)

    def _state(self, held: _Held, now: float) -> GroupState:
        expired = held.state == GroupState.CLAIMED and held.until <= now
        return GroupState.READY if expired else held.state

    def _claimed(self, group_ids: Sequence[str], owner: str) -> list[_Held]:
        found = [self._held[i] for i in set(group_ids) if i in self._held]
        return [h for h in found if h.state == GroupState.CLAIMED and h.owner == owner]
