"""A wake-up for long polls: everybody who waits is woken by each change. Waits are always bounded."""

from __future__ import annotations

import asyncio


class Signal:
    """`notify` wakes all present waiters; a waiter re-checks its condition and waits again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._waiting = 0

    def notify(self) -> None:
        """Wakes everybody."""
        if self._waiting:
            self._event.set()
            self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Until the next notify; False where `timeout_s` passed first."""
        event = self._event
        self._waiting += 1
        try:
            await asyncio.wait_for(event.wait(), max(timeout_s, 0.0))
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True
