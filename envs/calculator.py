"""`palestra/Calculator-v0`: arithmetic that has to be done with a calculator.

The policy gets a question ("What is 12 plus 30?"), must call `calculator(expression)`, reads the result and answers
with the number alone.

Reward, at most 1.0, all parts on the last step:

| component      | value | given when                                                                    |
| -------------- | ----- | ----------------------------------------------------------------------------- |
| `valid_call`   | 0.2   | the last call was in the right format: known tool, valid arguments, a value   |
| `right_call`   | 0.3   | that value is the task's answer                                               |
| `right_answer` | 0.5   | the final message is the answer, as an integer alone or "The answer is N"     |

The last call and the last message count. Without a valid call there is no credit for an answer: the tool must be used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.envs.arithmetic import LEVELS, evaluate, level_at, make_expression, spoken
from palestra.envs.tasks import GeneratedTasks, TaskSource
from palestra.envs.toolenv import ToolEnv
from palestra.envs.tools import call_message, tool
from palestra.envs.types import Message, Reward, Task, ToolError

WEIGHTS = {"valid_call": 0.2, "right_call": 0.3, "right_answer": 0.5}
SYSTEM = "First reply with a JSON tool call, then with the number."
PROMPTS = ("one_shot", "plain")
_ANSWER = re.compile(r"\s*(?:the answer is\s+)?(-?[0-9]{1,60})\s*\.?\s*", re.IGNORECASE)


def calls(expression: str, name: str = "calculator", call_id: str = "call_0") -> Message:
    """An assistant message that calls the calculator."""
    return call_message(name, json.dumps({"expression": expression}), call_id)


EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": "What is 12 plus 30?"},
    calls("12+30"),
    {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "42"},
    {"role": "assistant", "content": "The answer is 42."},
)
"""The one-shot example: without one, a small model that was never taught our tool format makes no valid call at all.

The wording was measured on SmolLM2-135M: the chance of the right call is 0.13 with this system message and a sentence
as the answer, 0.09 with a bare number as the answer, which the model then gives to the next question at once.
"""


def arithmetic_tasks(
    seed: int = 0, size: int = 4096, levels: Sequence[int] = (1,), prompt: str = "one_shot"
) -> TaskSource:
    """A deterministic source that rises through `levels`. `prompt`: "one_shot" puts a short example in front, "plain"
    does not.

    Raises:
        ValueError: unknown levels or prompt.
    """
    chosen = tuple(levels)
    if not chosen or any(level not in LEVELS for level in chosen):
        raise ValueError(f"levels must be some of {LEVELS}, got {chosen}")
    if prompt not in PROMPTS:
        raise ValueError(f"prompt must be one of {PROMPTS}, got {prompt!r}")
    system: Message = {"role": "system", "content": SYSTEM}
    before = (system, *EXAMPLE) if prompt == "one_shot" else (system,)

    def make(index: int) -> Task:
        level = level_at(chosen, index, size)
        expression = make_expression(seed, index, level)
        messages = (*before, {"role": "user", "content": spoken(expression)})
        meta = {"level": level, "expression": expression}
        return Task(messages, evaluate(expression), f"calculator/{seed}/{index}", meta)

    return GeneratedTasks(size, make)


def read_answer(content: Any) -> int | None:
    """The integer that a final message gives; None where it is anything else, or has anything beside it."""
    if not isinstance(content, str):
        return None
    found = _ANSWER.fullmatch(content) if len(content) <= 200 else None
    return int(found[1]) if found else None


class Calculator(ToolEnv):
    """Arithmetic with a calculator."""

    deterministic = True
    system: ClassVar[str | None] = SYSTEM

    def __init__(
        self,
        seed: int = 0,
        size: int = 4096,
        levels: Sequence[int] = (1,),
        prompt: str = "one_shot",
        render_mode: str | None = None,
        tasks: TaskSource | Sequence[Task] | None = None,
    ) -> None:
        super().__init__(render_mode, arithmetic_tasks(seed, size, levels, prompt) if tasks is None else tasks)

    @tool
    def calculator(self, expression: str) -> int:
        """Computes + - * and parentheses."""
        try:
            return evaluate(expression)
        except ValueError as error:
            raise ToolError(str(error)) from None

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        last = self.calls[-1] if self.calls else None
        valid = last is not None and last.error is None
        right = valid and last is not None and last.result == task.answer
        final = transcript[-1] if transcript else {}
        answer = (
            read_answer(final.get("content"))
            if final.get("role") == "assistant" and not final.get("tool_calls")
            else None
        )
        parts = {
            "valid_call": valid,
            "right_call": right,
            "right_answer": valid and answer is not None and answer == task.answer,
        }
        value = sum(WEIGHTS[name] for name, earned in parts.items() if earned)
        return Reward(round(value, 6), {name: float(earned) for name, earned in parts.items()}, f"answered {answer}")

    def oracle(self, task: Task) -> list[Message]:
        expression = task.meta.get("expression", str(task.answer))
        return [calls(str(expression), call_id="call_1"), {"role": "assistant", "content": str(task.answer)}]
