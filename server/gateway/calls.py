"""Calls that are under way, and who waits for them: a caller that lost its connection, or its patience, finds its own call again.

In: bodies of requests. Out: a `Call` whose task gives the reply: a new one, or the one that a repeated request belongs to. A call that
nobody waits for goes on for `GRACE_S`, then its engine requests are ended; what it sampled stays on record as undelivered. Nothing here
waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from palestra.server.gateway.session import Session
from palestra.server.gateway.types import ModelCall, ModelReply

GRACE_S = 20.0
"""How long a call without a caller goes on: the official clients come back within 8 seconds."""
KEPT = 4
"""Ended calls per session that a repetition under the same request id still finds."""

Runner = Callable[[Session, ModelCall, "Call"], Coroutine[Any, Any, ModelReply]]


@dataclass(slots=True, eq=False)
class Call:
    """One call of one session."""

    name: str
    """Under which the session keeps it."""
    body: bytes | int
    """The request's body, or its hash once it ended: only the same request is a repetition."""
    named: bool
    """Whether the caller gave the name (a request id)."""
    waiters: int = 0
    rids: set[str] = field(default_factory=set)
    """Its requests at the engine."""
    turns: tuple[int, ...] = ()
    """The turns that were recorded for it."""
    delivered: bool = False
    """Its reply went out whole at least once."""
    task: asyncio.Task[ModelReply] = field(init=False)
    timer: asyncio.TimerHandle | None = None
    dropped: bool = False
    """Nobody came back in time."""

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the reply, or has it."""
        return self.waiters > 0 or self.delivered

    def repeats(self, body: bytes) -> bool:
        """Whether a request is this one again."""
        return hash(body) == self.body if isinstance(self.body, int) else body == self.body

    @property
    def failed(self) -> bool:
        """It ended with an error: a repetition is a new call."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class CallDesk:
    """Finds or starts calls."""

    def __init__(self, run: Runner, cancel: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """`run` makes the reply; `cancel` ends a request at the engine."""
        self._run, self._cancel = run, cancel
        self._made = 0
        self._ending: set[asyncio.Task[None]] = set()

    def join(self, session: Session, call: ModelCall, body: bytes, name: str | None, retried: bool) -> Call:
        """The call of this request; the caller waits for its `task`, then says `leave` or `sent`.

        `name`: the caller's request id. `retried`: the caller says that this repeats a request.
        """
        known = session.calls.get(f"={name}") if name is not None else None
        if known is not None and not known.repeats(body):
            known = None  # an id of the caller's own tracing, not of this request
        if known is None and retried:
            known = next((c for c in session.calls.values() if not c.wanted and not c.failed and c.repeats(body)), None)
        if known is None or known.failed or known.dropped:
            known = self._start(session, call, body, name)
        known.waiters += 1
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        return known

    def _start(self, session: Session, call: ModelCall, body: bytes, name: str | None) -> Call:
        self._made += 1
        made = Call(f"={name}" if name is not None else f"#{self._made}", body, name is not None)
        session.calls[made.name] = made
        made.task = asyncio.ensure_future(self._run(session, call, made))
        made.task.add_done_callback(lambda task: self._ended(session, made))
        return made

    def _ended(self, session: Session, call: Call) -> None:
        if not call.task.cancelled():
            call.task.exception()  # whoever waits raises it; nobody may be left to
        if call.failed or call.dropped or (not call.named and call.wanted):
            self._forget(session, call)
            return
        call.body = hash(call.body)
        ended = [c for c in session.calls.values() if c.task.done() and c.named]
        for old in ended[: max(len(ended) - KEPT, 0)]:
            self._forget(session, old)

    @staticmethod
    def _forget(session: Session, call: Call) -> None:
        if session.calls.get(call.name) is call:  # another request may have the name by now
            del session.calls[call.name]

    def sent(self, call: Call) -> tuple[int, ...]:
        """The reply went out whole. Returns the turns that must be marked as delivered, since they were recorded while nobody waited."""
        call.waiters -= 1
        again, call.delivered = not call.delivered, True
        return call.turns if again else ()

    def leave(self, session: Session, call: Call) -> tuple[int, ...]:
        """The caller is gone. Returns the turns that must be marked as undelivered: the reply was ready, and nobody is left."""
        call.waiters -= 1
        if call.wanted:
            return ()
        if call.task.done():
            session.calls.setdefault(call.name, call)  # for a repetition; forgotten with the timer
        call.timer = asyncio.get_running_loop().call_later(GRACE_S, self._drop, session, call)
        return call.turns if call.task.done() else ()

    def _drop(self, session: Session, call: Call) -> None:
        call.dropped = True
        if call.task.done():
            self._forget(session, call)
        for rid in list(call.rids):
            task = asyncio.ensure_future(self._cancel(rid))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def end_all(self, session: Session) -> None:
        """Ends everything that runs for a session that closes; returns once the engine was told."""
        for call in list(session.calls.values()):
            for rid in list(call.rids):
                await self._cancel(rid)
