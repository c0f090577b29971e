"""How sessions begin, end and come back: the part of the service behind `/v1/sessions`.

In: what an opener says; rewards; the end. Out: sessions with keys, durable before anybody knows the key. A session that the run's own plan
opened is played again after a restart (see `reopening`); one that somebody else opened is found again, with every turn that was
acknowledged. It waits for the store, and for the engine to let go of what runs when a session ends.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, TypeAlias

import msgspec

from palestra.envs.types import StopReason
from palestra.server.gateway.calls import CallDesk
from palestra.server.gateway.recovered import DIVERGED, restored
from palestra.server.gateway.reopening import Reopener
from palestra.server.gateway.session import Session, SessionLimits, SessionTable, digest_of, new_key
from palestra.server.plan.names import PLANNED
from palestra.server.plan.plan import Plan
from palestra.server.renderer.tokens import TokenCodec
from palestra.server.store.turnlog import TurnLog
from palestra.server.store.types import SessionOutcome, SessionRecord, SessionState
from palestra.server.types import SessionError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
REWARD = "reward"
"""Kind of the event that keeps a reward until the session is closed."""


class OpenSession(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/sessions. Everything has a default: `{}` opens a session of its own."""

    rollout_id: str | None = None
    attempt: Index = 0
    group_id: str | None = None
    group_size: int | None = None
    """Given, the group is complete and can be claimed once so many of its sessions were closed."""
    task_id: str = ""
    index: int | None = None
    """Which rollout of the group; None: the next one."""
    task: Any = None
    """Kept with the session, for the reader."""
    limits: dict[str, Any] | None = None
    """Fields of SessionLimits; what is left out is the service's default."""
    sampling: str | None = None
    """Short for limits.sampling."""
    meta: dict[str, Any] | None = None
    replay: bool = False
    """The session is under way already, and its episode is played again from its start: the requests on record get the replies on record.
    For sessions of the run's plan; one that is not on record is opened as any other."""
    forced: list[list[int]] | None = None
    """A test's wish: the ids of the session's replies, call by call. Engines refuse it unless they were started for it."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/sessions/ID/reward: a number or named components (whose sum it is), of the session or of one turn."""

    reward: float | None = None
    components: dict[str, float] | None = None
    turn: Index | None = None
    """Index of the model call that it speaks of; None: the whole session."""
    attempt: Index | None = None


class CloseBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/sessions/ID/close. Without an outcome the rewards that were posted make it."""

    attempt: Index | None = None
    api_key: str | None = None
    """The session's key as its closer has it: what was opened again meanwhile is another's to end."""
    outcome: SessionOutcome | None = None
    masks: list[list[int]] | None = None
    """Made by hand: per branch a 0 or 1 per token of its row. A 1 on what no engine sampled is refused, and the session stays open."""
    infra_if_faulted: bool = False
    """Where the session's last model call failed by a fault of ours, the outcome has no reward: an agent that goes on after such a fault,
    or gives up, is no measure of the policy."""


class SessionDesk:
    """Opens, rewards and ends sessions."""

    def __init__(
        self, log: TurnLog, plan: Plan, table: SessionTable, calls: CallDesk, defaults: SessionLimits, codec: TokenCodec
    ) -> None:
        self.log, self.plan, self.table, self.calls, self.defaults = log, plan, table, calls, defaults
        self.codec = codec
        self.reopener = Reopener(log, plan, table, calls)

    async def open(self, asked: OpenSession) -> tuple[Session, str]:
        """A new session and its key.

        Raises:
            SessionError: 400 for what cannot be, 409 where it was opened before.
        """
        limits = self._limits(asked)
        planned = asked.group_id is not None and self.plan.is_planned(asked.group_id)
        rollout_id = asked.rollout_id or f"s-{secrets.token_hex(8)}"
        for name, value in (("rollout_id", rollout_id), ("group_id", asked.group_id or rollout_id)):
            if _ID.fullmatch(value) is None:
                raise SessionError(f"{name} {value[:200]!r}: letters, digits and ._:- only, at most 128")
        if not planned and asked.group_id is not None and PLANNED.fullmatch(asked.group_id):
            raise SessionError(f"group_id {asked.group_id!r}: names like g000001 are the run's own")
        if asked.replay:
            if not planned or asked.rollout_id is None:
                raise SessionError("replay: only a rollout of the run's own plan is played again")
            group, forced = str(asked.group_id), tuple(map(tuple, asked.forced or ()))
            if (again := await self.reopener.reopen((rollout_id, asked.attempt), group, limits, forced)) is not None:
                return again
        key, date = new_key(), time.strftime("%Y-%m-%d")
        record = SessionRecord(
            rollout_id=rollout_id,
            attempt=asked.attempt,
            group_id=asked.group_id or rollout_id,
            task_id=asked.task_id or rollout_id,
            index=asked.index or 0,
            meta={"date": date} if planned else self._outside_meta(asked, limits, key, date),
        )
        record = await self._store(record, None if planned else asked.group_size, asked)
        session = Session(record, limits, digest_of(key), date=date, forced=tuple(map(tuple, asked.forced or ())))
        self.table.add(session)
        return session, key

    async def _store(self, record: SessionRecord, group_size: int | None, asked: OpenSession) -> SessionRecord:
        if group_size is None:
            await self.log.open_session(record)
            return record
        if asked.group_id is None:
            raise SessionError("group_size is given, but no group_id")
        if record.meta["limits"]["sampling"] == "free":
            raise SessionError(
                "a group is for training, and limits.sampling is free: leave out group_size, or choose another sampling"
            )
        index = await self.plan.outside.adopt(record.group_id, group_size, asked.index, asked.attempt, asked.task)
        record = replace(record, index=index)
        try:
            await self.log.open_session(record)
        except SessionError:
            self.plan.outside.vacate(record.group_id, index)
            raise
        return record

    def _limits(self, asked: OpenSession) -> SessionLimits:
        given = dict(asked.limits or {})
        if asked.sampling is not None:
            given["sampling"] = asked.sampling
        known = asdict(self.defaults)
        if unknown := sorted(given.keys() - known.keys()):
            raise SessionError(f"limits: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        try:
            return msgspec.convert({**known, **given}, SessionLimits).check()
        except msgspec.ValidationError as error:
            raise SessionError(f"limits: {error}") from None

    @staticmethod
    def _outside_meta(asked: OpenSession, limits: SessionLimits, key: str, date: str) -> Mapping[str, Any]:
        return {
            "external": True,
            "key": digest_of(key).hex(),
            "limits": asdict(limits),
            "date": date,
            "group_size": asked.group_size,
            "task": asked.task,
            "meta": asked.meta or {},
        }

    async def reward(self, rollout_id: str, body: RewardBody) -> None:
        """Keeps a reward until the session is closed; of several for the same thing the last counts.

        Raises:
            SessionError: 404 for a session that is not open, 400 for a reward that is none.
        """
        session = self.table.by_id(rollout_id, body.attempt)
        given = [body.reward is not None, body.components is not None]
        if sum(given) != 1:
            raise SessionError("give either reward (a number) or components (numbers by name)")
        if body.turn is not None and session.tree.find(body.turn) is None:
            raise SessionError(f"turn {body.turn}: the session has no such turn", 404, "not_found")
        data = {"reward": body.reward, "components": body.components, "turn": body.turn}
        await self.log.add_event(rollout_id, session.record.attempt, REWARD, data)

    async def close(self, rollout_id: str, body: CloseBody) -> SessionOutcome | None:
        """Ends a session; what still runs for it is aborted. Repeating it changes nothing. Returns the outcome that counts; None where it
        had ended before.

        Raises:
            SessionError: 404 for a session that never was; 409 for one that a restart, or another caller, took from this one.
        """
        try:
            session = self.table.by_id(rollout_id, body.attempt)
        except SessionError:
            self.reopener.refuse_late(rollout_id, body.attempt or 0)
            await self.log.close_session(rollout_id, body.attempt or 0, body.outcome or SessionOutcome(None))
            return None
        if body.api_key is not None and digest_of(body.api_key) != session.digest:
            raise SessionError(f"session {rollout_id} was opened again, by another caller", 409, "session_reopened")
        outcome = body.outcome or self._posted(session)
        if body.infra_if_faulted and session.fault is not None and outcome.reward is not None:
            error = f"the last model call failed: {session.fault}"
            outcome = replace(outcome, reward=None, stop_reason=StopReason.INFRA.value, error=error)
        if session.replay is not None and session.replay.unplayed and outcome.reward is not None:
            # The reward is of another episode than the one on record.
            await self.discard(rollout_id, session.record.attempt, DIVERGED)
            return SessionOutcome(None, stop_reason=DIVERGED)
        return await self._end(session, outcome)

    async def _end(self, session: Session, outcome: SessionOutcome) -> SessionOutcome:
        record = session.record
        await self.reopener.shut(session)
        await self.log.close_session(record.rollout_id, record.attempt, outcome)
        await self.plan.ended(record, outcome)
        return outcome

    def _posted(self, session: Session) -> SessionOutcome:
        """The outcome that the posted rewards make; none posted: unknown, never 0."""
        value: float | None = None
        components: Mapping[str, float] = {}
        turns: list[float | None] = [None] * session.turns
        for event in self.log.reader.read_events(session.record.rollout_id):
            if event.kind != REWARD or event.attempt != session.record.attempt:
                continue
            parts = event.data["components"]
            number = event.data["reward"] if parts is None else sum(parts.values())
            if event.data["turn"] is not None:
                turns[event.data["turn"]] = number
            else:
                value, components = number, parts or {}
        if value is None and any(turn is not None for turn in turns):
            value = sum(turn for turn in turns if turn is not None)
        scored = tuple(turns) if any(turn is not None for turn in turns) else ()
        return SessionOutcome(value, components, scored, "closed", terminated=value is not None)

    async def discard(self, rollout_id: str, attempt: int | None, reason: str) -> None:
        """Takes a session out for good: its tokens are counted under `reason`, its group goes on without it.

        Raises:
            SessionError: 404 for a session that is not open.
        """
        session = self.table.by_id(rollout_id, attempt)
        record = session.record
        await self.reopener.shut(session)
        await self.reopener.take_out(record, reason)

    async def expire(self) -> None:
        """Ends outside sessions whose wall time is over: with the rewards that were posted, or with none."""
        for session in self.table.all():
            left = session.seconds_left
            if session.external and left is not None and left <= 0 and not session.closed:
                await self._end(session, replace(self._posted(session), stop_reason="deadline", truncated=True))

    def recover(self) -> int:
        """Finds the open sessions of outsiders again, as the log has them. Returns how many. Those of the plan wait to be opened again."""
        found = 0
        for stored in self.log.reader.read_sessions(state=SessionState.OPEN):
            if stored.record.meta.get("external"):
                trajectory = self.log.reader.read_trajectory(stored.record.rollout_id, stored.record.attempt)
                self.table.add(restored(stored, trajectory, self.codec))
                found += 1
            elif not self.table.has(stored.record.rollout_id, stored.record.attempt):
                self.reopener.interrupted.add((stored.record.rollout_id, stored.record.attempt))
        return found
