"""A loop over the plain `openai` client, with the environment's own tool descriptions and a score of its own.

One client serves all sessions: it asks for its key at every call. OPENAI_BASE_URL is set by the worker.
"""

from __future__ import annotations

import json
from typing import Any

import openai

from palestra.agents.session import session_key
from palestra.agents.types import Outcome
from palestra.envs.arithmetic import evaluate
from palestra.envs.calculator import read_answer
from palestra.envs.types import Task

# With retries of its own the client would play a lost call again, as another turn.
CLIENT = openai.OpenAI(api_key=session_key, max_retries=0)


def calculator(arguments: str) -> tuple[str, int | None]:
    """The text that answers a call, and its value where there is one."""
    try:
        value = evaluate(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}", None
    return str(value), value


def run(task: Task, messages: list[Any], tools: list[Any]) -> Outcome:
    """Plays until the model calls no tool any more, and scores the answer itself."""
    values: list[int] = []
    while True:
        reply = CLIENT.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls or ():
            text, value = (
                calculator(call.function.arguments) if call.type == "function" else ("Error: no such tool", None)
            )
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            values += [] if value is None else [value]
        if not reply.tool_calls:
            return score(task, values, reply.content or "")


def score(task: Task, values: list[int], answer: str) -> Outcome:
    """0.2 for a call that gave a value, 0.3 for the right value, 0.5 for the right answer after a call."""
    right = bool(values) and read_answer(answer) == task.answer
    parts = {
        "valid_call": float(bool(values)),
        "right_call": float(task.answer in values),
        "right_answer": float(right),
    }
    reward = 0.2 * parts["valid_call"] + 0.3 * parts["right_call"] + 0.5 * parts["right_answer"]
    return Outcome(reward=round(reward, 6), components=parts, answer=answer)
