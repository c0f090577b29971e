"""Users that nobody is: a user id of its own for each box of a keeper that runs as root.

Out: ids from a block that no other keeper of this machine uses. Waits for nothing.
"""

from __future__ import annotations

import socket

FIRST = 1_900_000_000
"""Above all ranges that distributions, systemd and subordinate ids give to somebody (systemd's UIDS-GIDS document calls it unused)."""
BLOCK = 1024
BLOCKS = 64


class Users:
    """A block of ids, taken in turn, so that an id is not used again soon."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: no block is free, or this process may not become others.
        """
        first, blocks = _range(_extents("/proc/self/uid_map"), _extents("/proc/self/gid_map"))
        self._lock, block = _claim(blocks)
        self.first = first + block * BLOCK
        self._free = list(range(self.first + BLOCK - 1, self.first - 1, -1))

    def take(self) -> int:
        """An id that no box has.

        Raises:
            OSError: all are in use.
        """
        if not self._free:
            raise OSError(f"{BLOCK} boxes run already; a keeper has no more users")
        return self._free.pop()

    def give(self, uid: int) -> None:
        """Its box is gone."""
        self._free.insert(0, uid)


def _claim(blocks: int) -> tuple[socket.socket, int]:
    # The name of an abstract socket is held as long as this process lives, however it ends, and leaves no file.
    for block in range(blocks):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0palestra-sandbox-users-{block}")
        except OSError:
            lock.close()
            continue
        return lock, block
    raise OSError(f"no block of user ids is free: {blocks} keepers run on this machine")


def _extents(path: str) -> list[tuple[int, int]]:
    with open(path) as file:
        rows = [tuple(map(int, line.split())) for line in file]
    return [(row[0], row[0] + row[2]) for row in rows]


def _range(uids: list[tuple[int, int]], gids: list[tuple[int, int]]) -> tuple[int, int]:
    """Where the ids begin, and how many blocks there are. In a user namespace, the upper half of what is mapped."""
    both = [
        (max(one[0], two[0]), min(one[1], two[1]))
        for one in uids
        for two in gids
        if max(one[0], two[0]) < min(one[1], two[1])
    ]
    for start, end in both:
        if start <= FIRST and end >= FIRST + BLOCK * BLOCKS:
            return FIRST, BLOCKS
    start, end = max(both, key=lambda pair: pair[1] - pair[0], default=(0, 0))
    blocks = min(BLOCKS, (end - start) // 2 // BLOCK)
    if blocks < 1:
        raise OSError(f"this user namespace maps {end - start} ids in a row; boxes of root need {2 * BLOCK}")
    return end - 2 - blocks * BLOCK, blocks
