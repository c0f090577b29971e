"""Sessions in memory: who may talk to which, what they may still spend, and where their conversation stands.

In: keys and ids from requests. Out: the session, or an error with its HTTP status. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from palestra.server.gateway.tree import ConversationTree
from palestra.server.store.types import SessionRecord
from palestra.server.types import SessionError


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may spend."""

    max_turns: int
    max_response: int
    """Tokens of one reply."""
    max_context: int
    """Prompt and reply together, tokens."""
    temperature: float


@dataclass(slots=True, eq=False)
class Session:
    """One open rollout."""

    record: SessionRecord
    key: str
    limits: SessionLimits
    tree: ConversationTree = field(default_factory=ConversationTree)
    turns: int = 0
    """Indices given out so far; a turn takes its own when it is recorded."""
    started: int = 0
    """Calls begun, running ones included: what the budget counts."""
    closed: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    running: dict[str, float] = field(default_factory=dict)
    """Engine request id -> time.monotonic() of its start."""
    replies: dict[str, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    """Request id of the caller -> its reply: a repeated call gets the same turn."""


class SessionTable:
    """All open sessions, by key and by id. Keys are compared in constant time."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_digest: dict[bytes, Session] = {}
        self._salt = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._by_id)

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._salt, key.encode(), "sha256")

    def add(self, record: SessionRecord, limits: SessionLimits) -> Session:
        """Opens a session under a fresh key; an older attempt of the same rollout stops being reachable by its id."""
        session = Session(record, f"sk-{secrets.token_urlsafe(24)}", limits)
        self._by_id[record.rollout_id] = session
        self._by_digest[self._digest(session.key)] = session
        return session

    def by_key(self, key: str | None) -> Session:
        """The session that `key` opens. Looked up by a keyed digest, so timing tells nothing about other keys.

        Raises:
            SessionError: 401, with how to open one.
        """
        session = self._by_digest.get(self._digest(key)) if key else None
        if session is None:
            raise SessionError(
                "unknown or missing session key; POST /v1/sessions with the admin token opens a session and returns its key",
                401,
                "invalid_api_key",
            )
        return session

    def by_path(self, part: str, key: str | None) -> Session:
        """The session of `/sessions/PART/v1`: PART is its key, or its id with the key sent beside it.

        Raises:
            SessionError: 401.
        """
        try:
            return self.by_key(part)
        except SessionError:
            session = self.by_key(key)
        if session.record.rollout_id != part:
            raise SessionError(f"the key does not open session {part}", 401, "invalid_api_key")
        return session

    def by_id(self, rollout_id: str, attempt: int | None = None) -> Session:
        """For control routes.

        Raises:
            SessionError: 404.
        """
        session = self._by_id.get(rollout_id)
        if session is None or (attempt is not None and session.record.attempt != attempt):
            raise SessionError(f"no open session {rollout_id} (attempt {attempt})", 404, "not_found")
        return session

    def remove(self, session: Session) -> None:
        """Forgets a session; its key opens nothing any more."""
        if self._by_id.get(session.record.rollout_id) is session:
            del self._by_id[session.record.rollout_id]
        self._by_digest.pop(self._digest(session.key), None)

    def all(self) -> list[Session]:
        """Every open session."""
        return list(self._by_digest.values())
