"""`palestra/FunctionCalling-v0`: requests that are met by calling functions, each task with functions of its own.

The first reply ends the episode; its calls are judged and not run.

| component | what it is                                                                                          |
| --------- | --------------------------------------------------------------------------------------------------- |
| `right`   | the reward, 0 or 1: all calls are right (see `checker.py`); where no function fits, the policy says so   |
| `names`   | the right functions were called, so many times as expected; a metric, not part of the reward          |

Where no function fits the reply has to be "No function fits." alone (`strict=True`): saying nothing earns nothing. The
leaderboard's own rule, that any reply without a call is right, is `strict=False`.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palestra.envs.core import MessageEnv
from palestra.envs.functions.bfcl import CATEGORIES, read_category, tool_name, tool_specs
from palestra.envs.functions.checker import Asked, example, judge
from palestra.envs.functions.generated import generated_tasks
from palestra.envs.schema import read_object
from palestra.envs.spaces import fresh
from palestra.envs.tasks import TaskSource
from palestra.envs.tools import asked_of
from palestra.envs.types import Message, Reward, Task, ToolSpec

DATA = ("generated", "bfcl")
SYSTEM = (
    "Call the functions that meet the request, all of them in one message. If none of them fits the request, reply with "
    "these words alone: No function fits."
)
_NONE_FITS = re.compile(r"\s{0,9}no function fits\s{0,9}\.?\s{0,9}", re.IGNORECASE)


@functools.cache
def _leaderboard(categories: tuple[str, ...]) -> tuple[Task, ...]:
    return tuple(task for category in categories for task in read_category(category))


class FunctionCalling(MessageEnv):
    """Function calling, judged call by call."""

    deterministic = True
    system: ClassVar[str | None] = SYSTEM
    _specs: tuple[ToolSpec, ...] = ()

    def __init__(
        self,
        data: str = "generated",
        categories: Sequence[str] = CATEGORIES,
        seed: int = 0,
        size: int = 1000,
        strict: bool = True,
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        """`data`: "generated" (by `seed`, so many as `size`), or "bfcl": the leaderboard's own, from the package
        bfcl-eval.

        Raises:
            ValueError: unknown data or categories, or the package is not installed (TaskError).
        """
        if data not in DATA:
            raise ValueError(f"data must be one of {DATA}, got {data!r}")
        self.strict = strict
        if tasks is None:
            chosen = tuple(categories)
            tasks = _leaderboard(chosen) if data == "bfcl" else generated_tasks(seed, size, chosen)
        super().__init__(render_mode, tasks)

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The functions of the task that is played; none before the first one."""
        return tuple(fresh(self._specs))

    def setup(self, task: Task) -> None:
        self._specs = tool_specs(task.meta["functions"])
        self.action_space.tools = self._specs  # type: ignore[attr-defined]  # samples are calls of this task's functions

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        reply = next((message for message in transcript if message.get("role") == "assistant"), {})
        asked = reply.get("tool_calls") or ()
        self.tool_calls = len(asked)
        if task.answer is None:
            content = reply.get("content")
            said = isinstance(content, str) and len(content) < 100 and _NONE_FITS.fullmatch(content) is not None
            right = bool(reply) and not asked and (said or not self.strict)
            return _reward(right, not asked and bool(reply), "" if right else "no function fits")
        functions = task.meta["functions"]
        try:
            calls = [_read(call, functions) for call in asked]
        except ValueError as error:
            self.tool_errors += 1
            return _reward(False, False, str(error))
        fault = judge(calls, task.answer, functions)
        expected = Counter(name for answer in task.answer for name in answer)
        return _reward(not fault, Counter(call.name for call in calls) == expected, fault)

    def oracle(self, task: Task) -> list[Message]:
        if task.answer is None:
            return [{"role": "assistant", "content": "No function fits."}]
        functions = {function["name"]: function for function in task.meta["functions"]}
        calls = [example(answer, functions[next(iter(answer))]) for answer in task.answer]
        return [{"role": "assistant", "content": "", "tool_calls": [_call(at, call) for at, call in enumerate(calls)]}]


def _reward(right: bool, names: bool, note: str) -> Reward:
    return Reward(float(right), {"right": float(right), "names": float(names)}, note)


def _read(call: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Asked:
    """A call by the function's own name, which can hold signs that chat APIs do not take."""
    name, raw = asked_of(call)
    own = next((function["name"] for function in functions if tool_name(function["name"]) == name), name)
    return Asked(own, read_object(raw))


def _call(position: int, call: Asked) -> dict[str, Any]:
    function = {"name": tool_name(call.name), "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{position}", "type": "function", "function": function}
