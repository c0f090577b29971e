"""Which routing key a group's requests have. All of them share one, so that one worker has the prompt cached; a group whose worker is full
gets another key, and with it another place in the router's ring.

In: groups, and what replies say of their worker. Out: keys. Pure; memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

QUEUED_S = 2.0
"""A request that waited longer for its place was at a full worker."""
MOST = 4096
"""Moved groups that are remembered."""


def saturated(retractions: int | None, queue_s: float | None) -> bool:
    """Whether a reply says that its worker was full: it was taken out of the batch for want of room, or waited for its place."""
    return bool(retractions) or (queue_s or 0.0) > QUEUED_S


class Pins:
    """Keys of groups; those that were never moved cost no memory."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._moves: OrderedDict[str, int] = OrderedDict()
        self.moved = 0
        """How often a group was moved."""

    def key(self, group: str) -> str:
        """The routing key of the group's next request."""
        moves = self._moves.get(group)
        return group if moves is None else f"{group}~{moves}"

    def move(self, group: str, key: str) -> bool:
        """Gives the group another key, after a request with `key` found a full worker. False where it has another one already: of many
        requests that found the same worker full, the first one moves the group."""
        if key != self.key(group):
            return False
        self._moves[group] = self._moves.get(group, 0) + 1
        self._moves.move_to_end(group)
        if len(self._moves) > self._most:
            self._moves.popitem(last=False)
        self.moved += 1
        return True
