"""Making boxes and ending them for the pool, with patience that has an end.

In: specs and boxes. Out: boxes, errors worth telling, counts. Waits for the backend, a bounded time for each thing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from palestra.sandbox.types import Backend, Box, BoxSpec, SandboxError, SandboxUnavailableError

logger = logging.getLogger(__name__)

CREATE_S = 60.0
"""Most seconds for one try at making a box."""
CLOSE_S = 60.0
"""Most seconds that a box may take to be gone before its place is given to another."""
PAUSES_S = (0.1, 0.4, 1.6)
"""Between tries at making a box; after the last one those who wait are told."""
TRIES = len(PAUSES_S) + 1
PATIENCE_S = TRIES * CREATE_S + sum(PAUSES_S)
"""Until when a box is there, or it is known that there will be none."""


class Maker:
    """A backend, tried several times."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.counts: Counter[str] = Counter()
        """`created_total`, `destroyed_total`, `create_failures_total`, `close_failures_total`."""
        self.create_s = 0.0
        """Seconds spent at making boxes that came to be."""
        self._stop = asyncio.Event()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """No more tries from here on; one that is under way ends by itself."""
        self._stop.set()

    async def create(self, spec: BoxSpec) -> Box:
        """Tries until a box is there.

        Raises:
            SandboxUnavailableError: it cannot be had.
            SandboxError: all tries failed, or `stop` was called; the text has the last reason.
        """
        reason = ""
        for pause_s in (*PAUSES_S, None):
            begun = time.monotonic()
            try:
                async with asyncio.timeout(CREATE_S):
                    box = await self.backend.create(spec)
            except SandboxUnavailableError:
                self.counts["create_failures_total"] += 1
                raise
            except TimeoutError:
                reason = f"not made within {CREATE_S:g} s"
            except (SandboxError, OSError) as error:
                reason = str(error)
            except Exception as error:
                # A fault of the backend's own code: those who wait must hear of it all the same.
                logger.exception("the %s backend failed", self.backend.name)
                reason = repr(error)
            else:
                self.counts["created_total"] += 1
                self.create_s += time.monotonic() - begun
                return box
            self.counts["create_failures_total"] += 1
            logger.warning("a %s box could not be made: %s", self.backend.name, reason)
            if pause_s is None or await self._stopped_within(pause_s):
                break
        raise SandboxError(f"no {self.backend.name} box could be made in {TRIES} tries; the last one: {reason}")

    async def destroy(self, box: Box) -> None:
        """Ends a box. Never raises: what could not be ended is logged, and counted as a fault of ours."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await box.close()
        except TimeoutError:
            self._not_gone(box, f"not gone within {CLOSE_S:g} s")
        except (SandboxError, OSError) as error:
            self._not_gone(box, str(error))
        except Exception as error:
            logger.exception("the %s backend failed", self.backend.name)
            self._not_gone(box, repr(error))
        else:
            self.counts["destroyed_total"] += 1

    def _not_gone(self, box: Box, reason: str) -> None:
        self.counts["close_failures_total"] += 1
        logger.error("box %s could not be destroyed: %s", box.id, reason)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True
