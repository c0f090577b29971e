"""Words of the sandbox host. Loads nothing heavy; waits for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from palestra.sandbox.box import AgentBox
from palestra.server.types import ServerError


class HostRefusal(ServerError):
    """A request that is not done; `status` is the HTTP status, `code` its short name."""

    def __init__(self, message: str, status: int, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


@dataclass(frozen=True, slots=True)
class HostSettings:
    """How a host lends its boxes."""

    boxes: int = 8
    """Most boxes that clients have at a time."""
    queue: int = 64
    """Most requests that wait for a box; further ones are refused."""
    lease_s: float = 60.0
    """A box that no client was heard of for so long is destroyed, seconds."""
    poll_s: float = 20.0
    """A request that is not over after so long is answered 202, seconds."""
    keep_s: float = 120.0
    """How long an answer is kept for a client that asks again, seconds."""
    share: tuple[str, ...] = ()
    """Folders of this machine that clients may have in their boxes, to read."""
    keep_bytes: int = 64 << 20
    """Most bytes of kept answers, of all boxes together."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request to a box, kept for those who ask again."""

    body: bytes
    """A frame; of an error, its text."""
    code: str = ""
    """Of an error: `box_lost`, `protocol` or `refused`."""
    lost: bool = False
    """Whether the box was destroyed with it."""


@dataclass(slots=True)
class Lease:
    """A box that a client has."""

    id: str
    box: AgentBox
    key: str
    """Under which it was asked for."""
    heard: float
    """When its client was last heard, on the loop's clock."""
    since: float
    """When it was given, on the loop's clock."""
    running: dict[int, asyncio.Task[Reply]] = field(default_factory=dict)
    """Requests that are not over, by their number."""
    runs: list[int] = field(default_factory=list)
    """Of these, those that run code, in their order: the first one runs, the others wait."""
    kept: dict[int, Reply] = field(default_factory=dict)
    """Answers that can be had again."""
    forgotten: int = 0
    """The largest number whose answer is kept no more."""
    whole: int = 0
    """All requests up to this number have come."""
    early: set[int] = field(default_factory=set)
    """Numbers that came before others below them."""
    unnumbered: int = 0
    """Counts down: numbers of requests whose sender gave none."""
    order: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever `whole` has grown."""

    def come(self, number: int) -> None:
        """A request of this number has come for the first time."""
        self.early.add(number)
        while self.whole + 1 in self.early:
            self.whole += 1
            self.early.discard(self.whole)
        self.order.set()
        self.order = asyncio.Event()

    async def in_order(self, number: int, patience_s: float) -> None:
        """Waits until all requests below this number have come, or as long as they could be on their way."""
        try:
            async with asyncio.timeout(patience_s):
                while self.whole < number:
                    await self.order.wait()
        except TimeoutError:
            return
