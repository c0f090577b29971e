"""Environments with tools: methods marked `@tool` are offered to the policy, and a message without calls is its
answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv, Response
from palestra.envs.spaces import fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.tools import Call, Tool, collect_tools, read_call, run_beside, run_call
from palestra.envs.types import Message, StopReason, Task, ToolSpec


class ToolEnv(MessageEnv):
    """Runs the calls of each assistant message and answers each with one tool message, in the order of the calls.

    A subclass gives `tasks`, methods marked `@tool` and `score`. State of an episode is set up in `setup`.
    """

    parallel: ClassVar[bool] = False
    """The calls of one message run one after the other, since tools may share state; True runs them at the same time,
    each in a thread of its own (async ones on the process's loop)."""

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
        started = time.perf_counter()
        try:
            if self.parallel and len(asked) > 1:
                beside = run_beside([partial(self.run_tool, call, True) for call in asked])
                return Response([self._keep(call) for call in beside])
            return Response([self._keep(self.run_tool(call)) for call in asked])
        finally:
            self.tool_seconds += time.perf_counter() - started

    def run_tool(self, asked: Mapping[str, Any], beside: bool = False) -> Call:
        """Runs one tool_call. Subclasses with tools of another kind take those themselves. `beside`: other calls of the
        message run at the same time, in other threads.

        Raises:
            EnvError: a fault of the tool; the episode cannot be scored.
        """
        return run_call(asked, self.tools, self, beside)

    def replay(self, transcript: Sequence[Message]) -> None:
        """The calls of an agent that played by itself, as they were answered: a rubric sees them as if they had been run
        here.
        """
        answers = {message.get("tool_call_id"): message for message in transcript if message.get("role") == "tool"}
        asked = (call for message in transcript for call in message.get("tool_calls") or ())
        self.calls = [read_call(call, answers[call.get("id")]) for call in asked if call.get("id") in answers]
        self.tool_errors = sum(call.error is not None for call in self.calls)

    def _keep(self, call: Call) -> Message:
        self.tool_calls += 1
        self.tool_errors += call.error is not None
        self.calls.append(call)
        return call.message

    def _restart(self) -> None:
        super()._restart()
        self.calls = []
