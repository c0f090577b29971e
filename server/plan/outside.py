"""Groups whose sessions somebody else opens: they count for no schedule, and are handed on once so many of their sessions have ended.

In: sessions that ask for a place. Out: their index. It waits for the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from palestra.server.plan.book import GroupBook
from palestra.server.plan.types import OpenGroup, PlanLog
from palestra.server.store.types import GroupRecord, SessionOutcome, SessionState, StoredSession
from palestra.server.types import SessionError


class OutsideGroups:
    """Places in the groups of outsiders."""

    def __init__(self, book: GroupBook, log: PlanLog, clock: Callable[[], float]) -> None:
        self.book, self.log, self._clock = book, log, clock

    async def adopt(self, group_id: str, size: int, index: int | None, attempt: int, task: Any) -> int:
        """A place for a session in an outside group, which is handed on once all of its sessions have ended. Returns the session's index.

        Raises:
            SessionError: 400 for a size that is none or another one than before; 409 where the group is complete, or the index taken.
        """
        if not 1 <= size <= 4096:
            raise SessionError(f"group_size is {size}, it must be 1 to 4096")
        group = self.book.groups.get(group_id)
        if group is None:
            if self.log.reader.read_groups(group_id=group_id):
                raise SessionError(f"group {group_id} is complete", 409, "group_complete")
            group = self.book.adopt(group_id, task, size)
        if len(group.slots) != size:
            raise SessionError(f"group {group_id} has {len(group.slots)} rollouts, not {size}")
        free = [s.index for s in group.slots if s.started_at is None or (s.outcome is None and s.attempt < attempt)]
        if index is not None and not 0 <= index < size:
            raise SessionError(f"index {index} is not within a group of {size}")
        if not free or (index is not None and index not in free):
            raise SessionError(f"group {group_id} has this session, or all of its {size}", 409, "group_complete")
        slot = group.slots[free[0] if index is None else index]
        slot.started_at, slot.attempt = self._clock(), attempt
        await self.log.put_group(GroupRecord(group_id, task, 0, size))
        return slot.index

    def vacate(self, group_id: str, index: int) -> None:
        """The session for which a place was taken was never opened."""
        if (group := self.book.groups.get(group_id)) is not None:
            group.slots[index].started_at = None

    def readopt(self, record: GroupRecord, sessions: Sequence[StoredSession]) -> OpenGroup:
        """An outside group as it stood before a restart: its sessions go on."""
        group = self.book.adopt(record.group_id, record.task, record.size)
        for session in sessions:
            slot = group.slots[session.record.index]
            slot.started_at, slot.attempt = self._clock(), session.record.attempt
            if session.state is not SessionState.OPEN:
                slot.outcome = session.outcome or SessionOutcome(None, stop_reason=session.discard_reason or "")
            group.task_id = session.record.task_id
        return group
