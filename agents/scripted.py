"""Policies that follow a script: for tests and for checking environments. Nothing is waited for."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.agents.types import PolicyReply
from palestra.envs.spaces import fresh
from palestra.envs.types import Message, ToolSpec


class ScriptedPolicy:
    """Says the given messages in order, and the last one again when they run out. A text stands for an assistant
    message.
    """

    def __init__(self, script: Sequence[Message | str]) -> None:
        if not script:
            raise ValueError("a script needs at least one message")
        self._script = [{"role": "assistant", "content": item} if isinstance(item, str) else item for item in script]
        self.calls = 0
        """How often it was asked."""

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec], timeout_s: float) -> PolicyReply:
        message = fresh(self._script[min(self.calls, len(self._script) - 1)])
        self.calls += 1
        return PolicyReply(message, "tool_calls" if message.get("tool_calls") else "stop")
