"""Where an agent finds out whose session it plays: `current()`.

An `AgentContext` goes in around `Agent.run`, and comes out wherever that run's own code asks, so that one client or graph made at import
can serve every session:

    ChatOpenAI(model="policy", base_url=..., api_key=session_key)

Asyncio tasks and `asyncio.to_thread` carry the context by themselves, and so do LangGraph's executors. A plain thread or pool, and
`loop.run_in_executor`, start without it: give them `contextvars.copy_context().run` as their function. Async clients call a plain key
function in such an executor: they need `async_session_key`, or an async function of your own. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from palestra.agents.types import AgentContext

_playing: ContextVar[AgentContext] = ContextVar("palestra_agent_context")


def current() -> AgentContext:
    """The context of the agent that runs here.

    Raises:
        RuntimeError: none does; says what to do.
    """
    try:
        return _playing.get()
    except LookupError:
        raise RuntimeError(
            "no agent of Palestra runs here: call current() inside Agent.run, or in what that starts. A plain thread does not take the "
            "context along: start it with contextvars.copy_context().run as its target"
        ) from None


def session_key() -> str:
    """The key of the session that is played here, as a function for clients that ask for their key at every call.

    Raises:
        RuntimeError: as `current`.
    """
    return current().session.api_key


async def async_session_key() -> str:
    """`session_key` for async clients.

    Raises:
        RuntimeError: as `current`.
    """
    return current().session.api_key


@contextmanager
def playing(context: AgentContext) -> Iterator[None]:
    """Makes `context` the current one for the code inside, and for what that starts."""
    token = _playing.set(context)
    try:
        yield
    finally:
        _playing.reset(token)
