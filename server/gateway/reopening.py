"""Sessions of the run's own plan that are played again from their start: after a restart of the service, or the loss of their worker.

In: a rollout and attempt that are open on record. Out: the session with a new key; its recorded replies are given again before anything is
sampled (`recovered.Replay`). It waits for the store, and for calls of the former player to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from palestra.server.gateway.calls import CallDesk
from palestra.server.gateway.recovered import DIVERGED, Replay
from palestra.server.gateway.session import Session, SessionLimits, SessionTable, digest_of, new_key
from palestra.server.plan.plan import Plan
from palestra.server.plan.recovery import ABANDONED
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord, SessionState, StoredSession
from palestra.server.types import SessionError, Turn

LET_GO_S = 30.0
"""How long calls of the former player may take to end once the engine was told, seconds."""
REPLAYED = "replay"
"""Kind of the event that says that a session was opened again, and how many turns were on record then."""


class Reopener:
    """Takes sessions from whoever has them, and opens them again."""

    def __init__(self, log: TurnLog, plan: Plan, table: SessionTable, calls: CallDesk) -> None:
        self.log, self.plan, self.table, self.calls = log, plan, table, calls
        self.interrupted: set[tuple[str, int]] = set()
        """Sessions of the plan that a former process left open. Nobody may end them before they are opened again."""

    async def reopen(
        self, key: tuple[str, int], group_id: str, limits: SessionLimits, forced: tuple[tuple[int, ...], ...] = ()
    ) -> tuple[Session, str] | None:
        """The session (rollout id, attempt), to be played again, and its new key: the former one opens nothing any more. None where it is
        not on record.

        Raises:
            SessionError: 409, it has ended, or a call of it does not end. 410, its tokens can no longer be trained on, or not together with
                new ones: it was discarded, and its rollout begins anew.
        """
        if self.table.has(*key):
            await self._leave(self.table.by_id(*key))
        if (stored := self._stored(*key)) is None:
            return None
        record = stored.record
        if stored.state is not SessionState.OPEN or record.group_id != group_id:
            raise SessionError(f"session {_name(key)} has ended, or is of another group", 409, "session_exists")
        turns = (await asyncio.to_thread(self.log.reader.read_trajectory, *key)).turns
        if (reason := await asyncio.to_thread(self._unfit, turns, limits)) is not None:
            await self.take_out(record, reason)
            raise SessionError(f"session {_name(key)} was discarded ({reason}); its rollout begins anew", 410, reason)
        secret = new_key()
        session = Session(
            record,
            limits,
            digest_of(secret),
            date=record.meta["date"],
            turns=max((turn.index + 1 for turn in turns), default=0),
            # Calls whose replies nobody got were counted too. The others are counted as they are given again.
            started=sum(bool(turn.messages) and not turn.delivered for turn in turns),
            sampled=stored.sampled_tokens,
            forced=forced,
        )

        async def diverged() -> None:
            await self.shut(session)
            await self.take_out(record, DIVERGED)

        session.replay = Replay(turns, diverged)
        await self.log.add_event(*key, REPLAYED, {"turns": len(turns)})
        self.interrupted.discard(key)
        self.table.add(session)
        return session, secret

    def refuse_late(self, rollout_id: str, attempt: int) -> None:
        """Somebody ends a session that is not open here.

        Raises:
            SessionError: 409, a restart took it from him: whether its last reply reached him is not known, and it is played again.
        """
        if (rollout_id, attempt) not in self.interrupted:
            return
        stored = self._stored(rollout_id, attempt)
        if stored is not None and stored.state is SessionState.OPEN:
            name = _name((rollout_id, attempt))
            raise SessionError(f"a restart interrupted session {name}; it is played again", 409, "session_reopened")
        self.interrupted.discard((rollout_id, attempt))

    async def shut(self, session: Session) -> None:
        """Its key opens nothing any more, and nothing runs for it."""
        session.closed = True
        await self.calls.end_all(session)
        self.table.remove(session)

    async def take_out(self, record: SessionRecord, reason: str) -> None:
        """Its tokens are counted under `reason`, and its group goes on without it."""
        await self.log.discard_session(record.rollout_id, record.attempt, reason)
        await self.plan.ended(record, SessionOutcome(None, stop_reason=reason))

    async def _leave(self, session: Session) -> None:
        """Takes a session from its present player. What its calls still sample is on record when this returns."""
        self.interrupted.add((session.record.rollout_id, session.record.attempt))
        running = [call.task for call in session.calls.values() if not call.task.done()]
        await self.shut(session)
        late = (await asyncio.wait(running, timeout=LET_GO_S))[1] if running else ()
        if late:
            key = session.record.rollout_id, session.record.attempt
            raise SessionError(f"{len(late)} calls of session {_name(key)} still run", 409, "session_busy")

    def _stored(self, rollout_id: str, attempt: int) -> StoredSession | None:
        sessions = self.log.reader.read_sessions(rollout_id=rollout_id)
        return next((session for session in sessions if session.record.attempt == attempt), None)

    def _unfit(self, turns: Sequence[Turn], limits: SessionLimits) -> str | None:
        """Why a session cannot go on: weights that the run no longer descends from, or another temperature than the run's, which would
        share a row with the old one."""
        if not self.plan.buffer.descends({span.version for turn in turns for span in turn.spans}):
            return ABANDONED
        other = any(abs(turn.temperature - limits.temperature) > 1e-6 for turn in turns)
        return DIVERGED if other and limits.sampling != "free" else None


def _name(key: tuple[str, int]) -> str:
    return f"{key[0]} attempt {key[1]}"
