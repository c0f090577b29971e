"""One model call, from a caller's request to a reply whose tokens are durably stored. The dialects' common core.

In: a session and a `ModelCall`. Out: a `ModelReply`. It waits for the engine and for the turn log, with no lock held: the conversation's
place is found before, and the turns are filed under it after. What the session can no longer take, or nobody waits for any more, is kept
apart as undelivered, so that every sampled token is accounted for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from palestra.server.engine import EngineClient
from palestra.server.gateway.calls import Call
from palestra.server.gateway.prompts import Place, PromptMaker
from palestra.server.gateway.recovered import recorded, said_in, take_orphan
from palestra.server.gateway.replies import choice_of, usage_of
from palestra.server.gateway.sampling import engine_sampling
from palestra.server.gateway.session import Session
from palestra.server.gateway.tree import Node
from palestra.server.gateway.types import Choice, Message, ModelCall, ModelReply
from palestra.server.renderer.types import ParsedReply, Renderer
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import Completion, EngineRefused, SessionError, Turn, VersionSpan

T = TypeVar("T")
MIN_REPLY = 8
"""Tokens that must fit after the prompt: less is no turn but a window that is full."""


@dataclass(frozen=True, slots=True)
class _Filed:
    """One choice after it was recorded."""

    completion: Completion
    """Without what an engine sampled past a stop text."""
    message: Message
    """As the caller will echo it."""
    choice: Choice
    turn: Turn


class TurnCore:
    """Makes turns for all sessions."""

    def __init__(
        self,
        renderer: Renderer,
        engine: EngineClient,
        log: TurnLog,
        model: str,
        on_turn: Callable[[Turn], None],
        *,
        experts: bool = False,
    ) -> None:
        self.renderer, self.engine, self.log, self.model, self.on_turn = renderer, engine, log, model, on_turn
        self.experts = experts
        self.prompts = PromptMaker(renderer)

    async def run(self, session: Session, call: ModelCall, waiting: Call) -> ModelReply:
        """The reply to one call.

        Raises:
            SessionError: the session is closed, its budget is spent, its window is full, or it cannot grant what is asked.
            RenderError: the family cannot express the messages.
            EngineError: the engine did not answer.
            StoreError: the turn could not be stored.
        """
        _check_open(session)
        if not call.forced_ids and session.started < len(session.forced):
            call = replace(call, forced_ids=session.forced[session.started])
        place = await self.prompts.place(session, call)
        await self._revive(session, place.base)
        if session.replay is not None and (turns := await session.replay.lead(session, call, place)):
            return await self._again(session, call, place, turns, waiting)
        if session.orphans and (node := take_orphan(session, call, place)) is not None:
            return await self._again(session, call, place, [recorded(self.log, session, node)], waiting)
        _check_budget(session)
        most = _reply_bound(session, call, place.length)
        stop_ids = self.renderer.stop_ids
        if not call.parallel_tool_calls and self.renderer.call_end is not None:
            stop_ids = (*stop_ids, self.renderer.call_end)
        wishes = [engine_sampling(session, call, most, stop_ids, choice=i, experts=self.experts) for i in range(call.n)]
        session.started += 1
        session.reserved += most * call.n
        try:
            completions = await self._generate(session, place, wishes, waiting)
        except BaseException:
            session.started -= 1  # a fault spends nothing of the budget
            raise
        finally:
            session.reserved -= most * call.n
        filed = await self._record(session, call, place, completions, wishes[0].temperature, waiting)
        return self._reply(session, call, place, filed)

    async def _again(
        self, session: Session, call: ModelCall, place: Place, turns: Sequence[Turn], waiting: Call
    ) -> ModelReply:
        """The replies of turns that are on record already, to a caller that may have lost them. They spend of the budget what they spent at
        first: one call, counted when the session was found again or, where it is played again, here."""
        filed = list[_Filed]()
        for turn in turns:
            completion = said_in(turn, call.stop, self.renderer.codec)
            parsed = ParsedReply(dict(turn.messages[-1]), turn.ill_formed)
            choice = choice_of(self.renderer, call, place, completion, parsed)
            filed.append(_Filed(completion, dict(parsed.message), choice, turn))
        if session.tree.find(turns[0].index) is None:
            for entry in filed:
                session.tree.add(self._node(place, entry, entry.turn.delivered))
            session.started += turns[0].delivered
        waiting.turns = tuple(turn.index for turn in turns)
        await self.mark(session, waiting.turns, waiting.wanted)
        return self._reply(session, call, place, filed)

    async def _generate(self, session: Session, place: Place, wishes: Sequence[Any], waiting: Call) -> list[Completion]:
        rids = [uuid.uuid4().hex for _ in wishes]
        waiting.rids.update(rids)
        left = session.seconds_left
        requests = [
            self.engine.generate(
                place.prompt,
                wish,
                rid=rid,
                key=session.record.group_id,
                deadline_s=left,
                later=place.base is not None,
            )
            for rid, wish in zip(rids, wishes, strict=True)
        ]
        try:
            return await _all(requests)
        except EngineRefused as error:
            raise SessionError(f"the engine refused the request: {error}", 400, "engine_refused") from error
        finally:
            waiting.rids.difference_update(rids)

    async def _revive(self, session: Session, node: Node | None) -> None:
        """A caller that goes on from a reply has it, whatever became of its connection: its turn counts after all."""
        lost = []
        while node is not None and not (node.followed and node.delivered):
            node.followed = True
            if not node.delivered:
                lost.append(node.index)
            node = node.parent
        await self.mark(session, lost, True)

    async def _record(
        self,
        session: Session,
        call: ModelCall,
        place: Place,
        completions: Sequence[Completion],
        temperature: float,
        waiting: Call,
    ) -> list[_Filed]:
        """Files one turn per completion, durably, and makes them findable."""
        delivered = not session.closed and waiting.wanted
        filed, turns = list[_Filed](), list[Turn]()
        for whole in completions:
            completion, tail = _split(whole)
            parsed = self.renderer.parse(completion.token_ids, place.opened)
            choice = choice_of(self.renderer, call, place, completion, parsed)
            turn = _turn(session.turns, place, completion, parsed, temperature, delivered)
            turns.append(turn)
            filed.append(_Filed(completion, dict(parsed.message), choice, turn))
            session.turns += 1
            if tail is not None:
                turns.append(_tail_turn(session.turns, place, completion, tail, temperature))
                session.turns += 1
            session.sampled += len(whole.token_ids)
        for turn in turns if session.limits.sampling != "free" else ():  # an evaluation's are no rollouts'
            self.on_turn(turn)
        key = session.record.rollout_id, session.record.attempt
        await _all([self.log.append_turn(*key, turn) for turn in turns])
        if session.closed:
            raise SessionError("the session was closed while the model answered", 409, "session_closed")
        for entry in filed:
            session.tree.add(self._node(place, entry, delivered))
        waiting.turns = tuple(entry.turn.index for entry in filed)
        # Somebody may have left or come back while it was written.
        await self.mark(session, waiting.turns, waiting.wanted)
        return filed

    async def mark(self, session: Session, turns: Sequence[int], delivered: bool) -> None:
        """Notes whether the replies of these turns reached their caller; in memory at once, durable when it returns."""
        key = session.record.rollout_id, session.record.attempt
        changed = list[asyncio.Future[None]]()
        for index in turns:
            node = session.tree.find(index)
            if node is not None and node.delivered != delivered and not (node.followed and not delivered):
                node.delivered = delivered
                changed.append(self.log.mark_delivered(*key, index, delivered))
        if changed:
            await _all(changed)

    def _node(self, place: Place, entry: _Filed, delivered: bool) -> Node:
        ids = entry.completion.token_ids
        return Node(
            index=entry.turn.index,
            parent=place.base,
            messages=place.new,
            reply=entry.message,
            delta=array("i", entry.turn.prompt_delta.tobytes()),
            completion=array("i", entry.turn.completion_ids.tobytes()),
            opened=len(place.opened),
            tools=place.tools_key,
            raw=place.raw,
            length=place.length + len(ids),
            joined=place.prompt.and_then(ids),
            delivered=delivered,
            text=None if place.text is None else place.text + self.renderer.codec.decode(ids),
        )

    def _reply(self, session: Session, call: ModelCall, place: Place, filed: Sequence[_Filed]) -> ModelReply:
        record = session.record
        return ModelReply(
            reply_id=f"{record.rollout_id}-{record.attempt}-{filed[0].turn.index}",
            model=call.model or self.model,
            created=int(time.time()),
            choices=tuple(entry.choice for entry in filed),
            usage=usage_of(self.renderer, place.length, [entry.completion for entry in filed]),
        )


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """What all of them give, or the first error once the others have ended: a request that is left alone would sample for nobody."""
    if len(work) == 1:
        return [await work[0]]
    results = []
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _check_open(session: Session) -> None:
    limits = session.limits
    if session.closed:
        raise SessionError(f"session {session.record.rollout_id} is closed", 409, "session_closed")
    if (left := session.seconds_left) is not None and left <= 0:
        raise SessionError(f"the session's {limits.deadline_s:.0f} s are over", 400, "budget_exceeded")


def _check_budget(session: Session) -> None:
    most = session.limits.max_turns
    if session.started >= most:
        raise SessionError(f"the session's budget of {most} turns is spent", 400, "budget_exceeded")


def _reply_bound(session: Session, call: ModelCall, prompt: int) -> int:
    """Tokens that each reply may have: what is asked, within the session's bounds, the window and the budget."""
    limits = session.limits
    wanted = min(call.max_tokens or limits.max_response, limits.max_response)
    room = limits.max_context - prompt
    if room < min(MIN_REPLY, wanted):
        raise SessionError(
            f"the prompt has {prompt} tokens and the window {limits.max_context}: no reply fits",
            400,
            "context_length_exceeded",
        )
    if limits.max_tokens is None:
        return min(wanted, room)
    left = (limits.max_tokens - session.sampled - session.reserved) // call.n
    if left < 1:
        raise SessionError(f"the session's budget of {limits.max_tokens} tokens is spent", 400, "budget_exceeded")
    return min(wanted, room, left)


def _split(whole: Completion) -> tuple[Completion, Completion | None]:
    """The reply, and what an engine sampled past a stop text that an abort had cut in two."""
    if not 0 <= whole.kept < len(whole.token_ids):
        return whole, None
    at, end = whole.kept, len(whole.token_ids)
    experts = whole.routed_experts
    return (
        Completion(
            whole.token_ids[:at],
            whole.logprobs[:at],
            whole.finish_reason,
            _spans(whole.spans, 0, at),
            whole.cached_tokens,
            None if experts is None else experts[: len(experts) - (end - at)],
            whole.top_logprobs[:at],
            whole.stop_text,
        ),
        Completion(whole.token_ids[at:], whole.logprobs[at:], "stop", _spans(whole.spans, at, end)),
    )


def _spans(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    cut = (VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in spans)
    return tuple(span for span in cut if span.end > span.start)


def _turn(index: int, place: Place, done: Completion, parsed: ParsedReply, temperature: float, delivered: bool) -> Turn:
    return Turn(
        index=index,
        parent=None if place.base is None else place.base.index,
        prompt_delta=np.asarray(place.delta, dtype=np.int32),
        close_tokens=place.close_tokens,
        completion_ids=np.asarray(done.token_ids, dtype=np.int32),
        logprobs=np.asarray(done.logprobs, dtype=np.float32),
        finish_reason=done.finish_reason,
        spans=done.spans,
        temperature=temperature,
        fork_reason=place.fork_reason,
        ill_formed=parsed.ill_formed,
        tools=place.tools_key if place.base is None else "",
        opened=len(place.opened),
        cached_tokens=max(done.cached_tokens, 0),
        delivered=delivered,
        messages=(*place.new, dict(parsed.message)),
        routed_experts=done.routed_experts,
    )


def _tail_turn(index: int, place: Place, kept: Completion, tail: Completion, temperature: float) -> Turn:
    """Tokens past the stop text, on record as a turn that nobody got."""
    return Turn(
        index=index,
        parent=None if place.base is None else place.base.index,
        prompt_delta=np.asarray([*place.delta, *kept.token_ids], dtype=np.int32),
        close_tokens=place.close_tokens,
        completion_ids=np.asarray(tail.token_ids, dtype=np.int32),
        logprobs=np.asarray(tail.logprobs, dtype=np.float32),
        finish_reason=tail.finish_reason,
        spans=tail.spans,
        temperature=temperature,
        delivered=False,
    )
