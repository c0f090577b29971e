"""`examples/Measures-v0`: sums and lengths, for an agent that brings its own tools. The rubric reads the conversation and the answer.

Reward: 0.2 for a tool that gave a value, 0.3 for the right value from a tool, 0.5 for the right answer after a tool was used.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from palestra.envs.arithmetic import evaluate, make_expression, spoken
from palestra.envs.core import MessageEnv
from palestra.envs.registry import register
from palestra.envs.tasks import GeneratedTasks
from palestra.envs.types import Message, Reward, Task

METRES = {"cm": 0.01, "m": 1.0, "km": 1000.0}
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def call(name: str, number: int, **arguments: Any) -> Message:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


EXAMPLES: tuple[Message, ...] = (
    {"role": "user", "content": "What is 12 plus 30?"},
    call("calculator", 0, expression="12+30"),
    {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "42"},
    {"role": "assistant", "content": "The answer is 42."},
    {"role": "user", "content": "How many m are 3 km?"},
    call("convert", 1, value=3, source="km", target="m"),
    {"role": "tool", "tool_call_id": "call_1", "name": "convert", "content": "3000.0"},
    {"role": "assistant", "content": "The answer is 3000."},
)


def make_task(index: int) -> Task:
    """A sum for an even index, a length for an odd one."""
    if index % 2 == 0:
        expression = make_expression(0, index, 1)
        question, answer = spoken(expression), float(evaluate(expression))
    else:
        rng = random.Random(index)
        source, target = rng.sample(sorted(METRES), 2)
        value = rng.randint(2, 99)
        answer = round(value * METRES[source] / METRES[target], 6)
        question = f"How many {target} are {value} {source}?"
    return Task((*EXAMPLES, {"role": "user", "content": question}), answer, f"measures/{index}")


def number_of(text: Any) -> float | None:
    """The one number in a text; None where there are none or several."""
    found = _NUMBER.findall(text) if isinstance(text, str) and len(text) < 200 else []
    return float(found[0]) if len(found) == 1 else None


@register("examples/Measures-v0")
class Measures(MessageEnv):
    """Sums and lengths. The tools are the agent's."""

    system: ClassVar[str | None] = "First call a tool, then reply with the number."
    tasks = GeneratedTasks(4096, make_task)

    def score(self, task: Task, transcript: Sequence[Message]) -> Reward:
        """See the module."""
        results = [number_of(message.get("content")) for message in transcript if message.get("role") == "tool"]
        final = transcript[-1] if transcript else {}
        used = any(value is not None for value in results)
        parts = {
            "valid_call": used,
            "right_call": task.answer in results,
            "right_answer": used
            and final.get("role") == "assistant"
            and number_of(final.get("content")) == task.answer,
        }
        value = 0.2 * parts["valid_call"] + 0.3 * parts["right_call"] + 0.5 * parts["right_answer"]
        return Reward(round(value, 6), {name: float(earned) for name, earned in parts.items()})
