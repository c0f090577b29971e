"""A gate that requests wait at while weights change or a trainer has the devices, and that lets the oldest through first.

In: `clear` and `set`; waiters with the time at which their request began. Out: their wake-up, in that order, so that a request which was
taken off an engine again and again is still the first one back. Waits as long as its caller lets it.
"""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first. Of one event loop."""

    def __init__(self) -> None:
        self._open = True
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    def is_set(self) -> bool:
        """Whether it is open."""
        return self._open

    def clear(self) -> None:
        """Closes it."""
        self._open = False

    def set(self) -> None:
        """Opens it; whoever waits goes on, those first whose requests began first."""
        self._open = True
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[:2]), []
        for _, _, future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, began: float = 0.0) -> None:
        """Until it is open. `began`: when the request that waits was begun, by any one clock."""
        while not self._open:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._arrivals += 1
            entry = (began, self._arrivals, future)
            self._waiting.append(entry)
            try:
                await future
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)
