"""Sessions of a box, as their user sees them. Waits for the box's agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra.sandbox.types import BoxFileError, BoxLostError, ExecResult, SessionKind

if TYPE_CHECKING:
    from palestra.sandbox.box import AgentBox

CONTROL_S = 15.0


class AgentSession:
    """`types.Session` of an `AgentBox`."""

    def __init__(self, box: AgentBox, kind: SessionKind, number: int) -> None:
        self.kind = kind
        self._box, self._number = box, number
        self._open, self._closed = True, False

    @property
    def alive(self) -> bool:
        return self._open and self._box.alive

    async def run(self, code: str, *, timeout: float = 30.0, max_output: int | None = None) -> ExecResult:
        if not self._open:
            return ExecResult("session_lost", message="the session is over; open another")
        request = {"op": "cell", "session": self._number, "code": code}
        return await self._box.run(request, timeout, max_output, self._heard)

    def _heard(self, reply: dict[str, Any]) -> None:
        # A refused cell says nothing of the session.
        if reply.get("alive") == 0:
            self._open = False

    async def interrupt(self) -> None:
        if self._open:
            await self._box.ask({"op": "interrupt", "session": self._number}, CONTROL_S)

    async def close(self) -> None:
        if self._closed:
            return
        self._open, self._closed = False, True
        try:
            await self._box.ask({"op": "shut", "session": self._number}, CONTROL_S)
        except (BoxLostError, BoxFileError):
            return  # its processes ended with the box, or before
