"""Which answers of the service end a conversation without being a fault: the window is full, the budget is spent, the session was closed.

A status and an error body, or an exception of any client library, go in; a `PolicyStop` comes out, or None where it is a fault. Nothing is
waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.agents.types import PolicyStop
from palestra.envs.types import StopReason

STOP_CODES = {
    "context_length_exceeded": StopReason.CONTEXT,
    "session_closed": StopReason.CANCELLED,
    "cancelled": StopReason.CANCELLED,
}
"""Error codes of the service that end the conversation and are no fault."""


def stop_of(status: int, body: Mapping[str, Any], said: str) -> PolicyStop | None:
    """What an HTTP answer means. `body` is the error's own object: message, code, param."""
    if not 400 <= status < 500:
        return None
    code = str(body.get("code") or "")
    if (reason := STOP_CODES.get(code)) is not None:
        return PolicyStop(reason, said)
    if code == "budget_exceeded":
        spent = str(body.get("param") or said)
        kinds = {"token": StopReason.MAX_TOKENS, "turn": StopReason.MAX_TURNS}
        return PolicyStop(next((kinds[word] for word in kinds if word in spent), StopReason.DEADLINE), said)
    return None


def stop_in(error: BaseException) -> PolicyStop | None:
    """The stop that an agent's exception carries, itself or as what it was raised from. The clients of OpenAI and Anthropic, and what is
    built on them, put `status_code` and `body` on their exceptions.
    """
    for one in _chain(error):
        if isinstance(one, PolicyStop):
            return one
        status, body = getattr(one, "status_code", None), getattr(one, "body", None)
        if isinstance(status, int) and isinstance(body, Mapping):
            inner = body.get("error")
            fields = inner if isinstance(inner, Mapping) else body
            if (stop := stop_of(status, fields, str(fields.get("message") or one))) is not None:
                return stop
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        before = one.__cause__ if one.__suppress_context__ else one.__cause__ or one.__context__
        if before is not None:
            waiting.append(before)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
