"""Environments with tools: methods marked `@tool` are offered to the policy, and a message without calls is its
answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv, Response
from palestra.envs.spaces import fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.tools import Call, Tool, collect_tools, read_call, run_call
from palestra.envs.types import Message, StopReason, Task, ToolSpec


class ToolEnv(MessageEnv):
    """Runs the calls of each assistant message, one after the other, and answers each with one tool message.

    A subclass gives `tasks`, methods marked `@tool` and `score`. State of an episode is set up in `setup`.
    """

    tools: ClassVar[Mapping[str, Tool]] = {}
    """By the name that the model sees; described once per class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tools = collect_tools(cls)

    def __init__(self, render_mode: str | None = None, tasks: TaskSource | Sequence[Task] | None = None) -> None:
        self.calls: list[Call] = []
        """The calls of this episode, in order; what graders judge."""
        super().__init__(render_mode, tasks)

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(fresh(tool.spec) for tool in self.tools.values())

    def respond(self, action: Message) -> Response:
        asked = action.get("tool_calls")
        if not asked:
            return Response(stop=StopReason.ANSWER)
        return Response([self._answer(call) for call in asked])

    def replay(self, transcript: Sequence[Message]) -> None:
        """The calls of an agent that played by itself, as they were answered: a rubric sees them as if they had been run
        here.
        """
        answers = {message.get("tool_call_id"): message for message in transcript if message.get("role") == "tool"}
        asked = (call for message in transcript for call in message.get("tool_calls") or ())
        self.calls = [read_call(call, answers[call.get("id")]) for call in asked if call.get("id") in answers]
        self.tool_errors = sum(call.error is not None for call in self.calls)

    def _answer(self, asked: Mapping[str, Any]) -> Message:
        started = time.perf_counter()
        call = run_call(asked, self.tools, self)
        self.tool_seconds += time.perf_counter() - started
        self.tool_calls += 1
        self.tool_errors += call.error is not None
        self.calls.append(call)
        return call.message

    def _restart(self) -> None:
        super()._restart()
        self.calls = []
