"""One model call, from a request in OpenAI's dialect to a reply whose tokens are durably stored.

In: a session and a checked request. Out: a reply body. It waits for the engine and for the turn log, with no lock held: the conversation's
place is found before, and the turn is filed under it after. A call that is repeated under the same `X-Request-Id` gets the turn that the
first one made. A turn that the session can no longer take is kept apart as undelivered, so that every sampled token is accounted for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.server.engine import EngineClient, EngineSampling
from palestra.server.gateway.session import Session
from palestra.server.gateway.tree import Match, Node, canonical_tools
from palestra.server.gateway.wire import ChatRequest, Usage, chat_reply
from palestra.server.renderer.base import Renderer
from palestra.server.store.turnlog import TurnLog
from palestra.server.types import Completion, EngineError, EngineRefused, RenderError, SessionError, Turn

MIN_REPLY = 8
"""Tokens that must fit after the prompt: less is no turn but a window that is full."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as token ids."""

    match: Match
    ids: list[int]
    """The whole prompt."""
    delta: list[int]
    """The part after the base's ids."""
    close_tokens: int
    fork_reason: str | None
    max_new_tokens: int


class ChatGateway:
    """Serves `/v1/chat/completions` for all sessions."""

    def __init__(
        self, renderer: Renderer, engine: EngineClient, log: TurnLog, model: str, on_turn: Callable[[int], None]
    ) -> None:
        self.renderer, self.engine, self.log, self.model, self.on_turn = renderer, engine, log, model, on_turn

    async def reply(self, session: Session, request: ChatRequest, request_id: str | None) -> dict[str, Any]:
        """The reply to one call; a repeated `request_id` gets the first one's, also while that one still runs.

        Raises:
            SessionError: the session is closed, its budget is spent, its window is full, or the request cannot be rendered.
            EngineError: the engine did not answer.
        """
        if request_id is None:
            return await self._reply(session, request)
        if (known := session.replies.get(request_id)) is not None and not (known.done() and known.exception()):
            return await asyncio.shield(known)
        future: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(self._reply(session, request))
        session.replies[request_id] = future
        # The call outlives its connection: a client that lost it comes back under the same id and gets this very turn.
        return await asyncio.shield(future)

    async def undelivered(self, session: Session, index: int) -> None:
        """The caller of turn `index` was gone before its reply left: the turn is kept apart, so that the repeated call is not trained
        beside it."""
        session.tree.remove(index)
        await self.log.mark_undelivered(session.record.rollout_id, session.record.attempt, index)

    async def _reply(self, session: Session, request: ChatRequest) -> dict[str, Any]:
        _check_open(session)
        if session.started >= session.limits.max_turns:
            raise SessionError(
                f"the session's budget of {session.limits.max_turns} turns is spent", 400, "budget_exceeded"
            )
        prompt = self._prompt(session, request)
        session.started += 1
        rid = uuid.uuid4().hex
        session.running[rid] = time.monotonic()
        try:
            completion = await self.engine.generate(
                prompt.ids, self._sampling(session, request, prompt), rid=rid, key=session.record.group_id
            )
        except EngineError as error:
            session.started -= 1  # a fault spends nothing of the budget
            if not isinstance(error, EngineRefused):
                raise
            raise SessionError(f"the engine refused the request: {error}", 400, "engine_refused") from error
        finally:
            session.running.pop(rid, None)
        return await self._record(session, request, prompt, completion)

    def _sampling(self, session: Session, request: ChatRequest, prompt: Prompt) -> EngineSampling:
        """The session's own sampling: an agent cannot change the distribution that is trained on."""
        return EngineSampling(
            session.limits.temperature,
            prompt.max_new_tokens,
            self.renderer.stop_ids,
            forced_ids=tuple(request.forced_ids or ()),
        )

    def _prompt(self, session: Session, request: ChatRequest) -> Prompt:
        tools = request.tools or []
        match = session.tree.match(request.messages, canonical_tools(tools))
        try:
            if match.base is None:
                delta, close, ids = self.renderer.render(request.messages, tools), 0, list[int]()
            else:
                ids = match.base.ids
                extension = self.renderer.extend(match.new, ids[-1])
                delta, close = list(extension.ids), extension.close_tokens
        except RenderError as error:
            raise SessionError(str(error), 400, "cannot_render") from error
        whole = [*ids, *delta]
        room = session.limits.max_context - len(whole)
        asked = request.max_completion_tokens or request.max_tokens or session.limits.max_response
        wanted = min(asked, session.limits.max_response)
        if room < min(MIN_REPLY, wanted):
            raise SessionError(
                f"the prompt has {len(whole)} tokens and the window {session.limits.max_context}: no reply fits",
                400,
                "context_length_exceeded",
            )
        return Prompt(match, whole, delta, close, match.fork_reason, min(wanted, room))

    async def _record(
        self, session: Session, request: ChatRequest, prompt: Prompt, completion: Completion
    ) -> dict[str, Any]:
        parsed = self.renderer.parse(completion.token_ids)
        base = prompt.match.base
        delivered = not session.closed
        turn = Turn(
            index=session.turns,
            parent=None if base is None else base.index,
            prompt_delta=np.asarray(prompt.delta, dtype=np.int32),
            close_tokens=prompt.close_tokens,
            completion_ids=np.asarray(completion.token_ids, dtype=np.int32),
            logprobs=np.asarray(completion.logprobs, dtype=np.float32),
            finish_reason=completion.finish_reason,
            spans=completion.spans,
            temperature=session.limits.temperature,
            fork_reason=prompt.fork_reason,
            cached_tokens=max(completion.cached_tokens, 0),
            delivered=delivered,
            messages=(*prompt.match.new, parsed.message),
            routed_experts=completion.routed_experts,
        )
        session.turns += 1
        await self.log.append_turn(session.record.rollout_id, session.record.attempt, turn)
        self.on_turn(len(completion.token_ids))
        if not delivered:
            raise SessionError("the session was closed while the model answered", 409, "session_closed")
        ids = [*prompt.ids, *completion.token_ids]
        tools = canonical_tools(request.tools or [])
        session.tree.add(Node(turn.index, base, prompt.match.new, parsed.message, ids, tools))
        return self._body(session, request, prompt, completion, parsed.message)

    def _body(
        self, session: Session, request: ChatRequest, prompt: Prompt, completion: Completion, message: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs: list[dict[str, Any]] | None = None
        if request.logprobs:
            text = self.renderer.codec.token_text
            logprobs = [
                {"token": text(i), "logprob": lp, "bytes": None, "top_logprobs": []}
                for i, lp in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
        return chat_reply(
            reply_id=f"chatcmpl-{session.record.rollout_id}-{session.turns - 1}",
            model=request.model or self.model,
            message=message,
            finish_reason=completion.finish_reason,
            usage=Usage(len(prompt.ids), len(completion.token_ids), max(completion.cached_tokens, 0)),
            logprobs=logprobs,
        )


def _check_open(session: Session) -> None:
    if session.closed:
        raise SessionError(f"session {session.record.rollout_id} is closed", 409, "session_closed")
