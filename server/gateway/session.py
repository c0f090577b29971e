"""Sessions in memory: who may talk to which, what they may still spend, and where their conversation stands.

In: keys and ids from requests. Out: the session, or an error with its HTTP status. Nothing here waits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from palestra.server.gateway.tree import ConversationTree, Node
from palestra.server.store.types import SessionRecord
from palestra.server.types import SessionError

if TYPE_CHECKING:
    from palestra.server.gateway.calls import Call
    from palestra.server.gateway.recovered import Replay

SAMPLING = ("strict", "override", "free")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may spend, and how its tokens are drawn."""

    max_turns: int
    """Model calls."""
    max_response: int
    """Tokens of one reply."""
    max_context: int
    """Prompt and reply together, tokens."""
    temperature: float
    max_tokens: int | None = None
    """Sampled tokens of the whole session; None: no bound."""
    deadline_s: float | None = None
    """Wall time from the opening, seconds; None: no bound."""
    sampling: str = "strict"
    """strict: a call that asks for another distribution than the session's is refused; override: it gets the session's; free: it gets what
    it asks for, and the session is not trained on (evaluation)."""

    def check(self) -> SessionLimits:
        """Raises:
        SessionError: 400, a bound that nothing fits in.
        """
        for name in ("max_turns", "max_response", "max_context"):
            if getattr(self, name) < 1:
                raise SessionError(f"limits.{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SessionError(f"limits.max_tokens is {self.max_tokens}, it must be at least 1")
        if self.deadline_s is not None and not 0 < self.deadline_s < float("inf"):
            raise SessionError(f"limits.deadline_s is {self.deadline_s}, it must be above 0")
        if not 0 < self.temperature <= 100 and not (self.sampling == "free" and self.temperature == 0):
            raise SessionError(
                f"limits.temperature is {self.temperature}, it must be above 0 (0 only where sampling is free)"
            )
        if self.sampling not in SAMPLING:
            raise SessionError(f"limits.sampling is {self.sampling!r}; known: {', '.join(SAMPLING)}")
        return self


@dataclass(slots=True, eq=False)
class Session:
    """One open rollout."""

    record: SessionRecord
    limits: SessionLimits
    digest: bytes
    """SHA-256 of its key."""
    tree: ConversationTree = field(default_factory=ConversationTree)
    date: str = ""
    """ISO date of its opening: what templates print."""
    turns: int = 0
    """Indices given out so far; a turn takes its own when it is recorded."""
    started: int = 0
    """Calls begun, running ones included: what the budget counts."""
    sampled: int = 0
    """Tokens sampled and recorded."""
    reserved: int = 0
    """Tokens that running calls may still sample."""
    closed: bool = False
    opened_at: float = field(default_factory=time.monotonic)
    calls: dict[str, Call] = field(default_factory=dict)
    """Calls that run, or ended a short while ago, by the name under which a repetition finds them."""
    orphans: list[Node] = field(default_factory=list)
    """Branch ends that a former process of the service recorded: nobody knows whether their replies were sent."""
    replay: Replay | None = None
    """What is on record of it, where it is played again from its start."""
    fault: str | None = None
    """Why its last model call failed, where that was a fault of ours; None once a later one succeeded."""
    forced: tuple[tuple[int, ...], ...] = ()
    """A test's wish: ids of its replies, call by call."""

    @property
    def seconds_left(self) -> float | None:
        """Wall time until its deadline; None without one."""
        if self.limits.deadline_s is None:
            return None
        return self.opened_at + self.limits.deadline_s - time.monotonic()

    @property
    def external(self) -> bool:
        """Opened by somebody else than the run's plan: it outlives the service's process."""
        return bool(self.record.meta.get("external"))


def new_key() -> str:
    """A fresh session key: 192 random bits."""
    return f"sk-{secrets.token_urlsafe(24)}"


def digest_of(key: str) -> bytes:
    """What is kept of a key. Keys are random, so a plain hash is enough; sessions are looked up by it, so timing tells nothing of keys."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


class SessionTable:
    """All open sessions, by key and by id."""

    def __init__(self, agent_key: str | None = None) -> None:
        """`agent_key`: opens the model routes of any session that a request names; None: there is no such key."""
        self._by_id: dict[str, Session] = {}
        self._by_digest: dict[bytes, Session] = {}
        self._agent_key = agent_key

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        """Makes a session reachable; an older attempt of the same rollout stops being reachable by its id."""
        self._by_id[session.record.rollout_id] = session
        self._by_digest[session.digest] = session

    def by_key(self, key: str | None) -> Session:
        """The session that `key` opens.

        Raises:
            SessionError: 401, with how to open one.
        """
        session = self._by_digest.get(digest_of(key)) if key else None
        if session is None:
            raise SessionError(
                "unknown or missing session key; POST /v1/sessions with the admin token opens a session and returns its key",
                401,
                "invalid_api_key",
            )
        return session

    def named(self, name: str, key: str | None) -> Session:
        """The session of `/sessions/NAME/v1` or of `X-Session-Id: NAME`. NAME is its key, or its id with a key that fits.

        Raises:
            SessionError: 401.
        """
        session = self._by_digest.get(digest_of(name))
        if session is not None:
            return session
        if self._agent_key and hmac.compare_digest((key or "").encode(), self._agent_key.encode()):
            session = self._by_id.get(name)
        elif (own := self.by_key(key)).record.rollout_id == name:
            session = own
        if session is None:
            raise SessionError("the key does not open this session", 401, "invalid_api_key")
        return session

    def has(self, rollout_id: str, attempt: int) -> bool:
        """Whether that session is open."""
        session = self._by_id.get(rollout_id)
        return session is not None and session.record.attempt == attempt

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
        self._by_digest.pop(session.digest, None)

    def all(self) -> Iterable[Session]:
        """Every open session."""
        return list(self._by_digest.values())
