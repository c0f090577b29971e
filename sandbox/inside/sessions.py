"""Sessions: interpreters of a box that keep their state between runs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent, Foreground


class Session:
    """One interpreter."""

    pid: int
    alive: bool

    def begin(self, request: dict[str, Any]) -> Foreground:
        """Starts a cell; the agent is told by `done` when it is over."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ctrl-C to what runs."""
        raise NotImplementedError

    def end(self) -> None:
        """Kills it and what it started."""
        raise NotImplementedError


def start(agent: Agent, kind: str) -> Session:
    """An interpreter of this kind."""
    raise RuntimeError(f"no sessions of kind {kind}")
