"""Transcripts of the calculator for supervised warm start: an oracle that errs on purpose.

A source of tasks goes in, transcripts {"messages", "tools"} come out, as `tokenise` of supervised training wants them.
Noise leaves the model a spread of behaviour: one that was shown only perfect transcripts has nothing to learn from
rewards.
"""

from __future__ import annotations

import random
from typing import Any

from palestra.envs.calculator import Calculator, calls
from palestra.envs.tasks import TaskSource
from palestra.envs.types import Message, StopReason, Task

Transcript = dict[str, Any]
"""{"messages": [...], "tools": [...]}; the last message is an assistant's."""


def demonstrations(source: TaskSource, n: int, noise: float = 0.0, seed: int = 0) -> list[Transcript]:
    """`n` transcripts of tasks drawn from `source`.

    Args:
        noise: the chance that the call is spoiled (other tool, other numbers, no valid JSON, plain text, a guess), and,
            after a good call, that the answer is.
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise is a probability, got {noise}")
    rng = random.Random(f"demonstrations/{seed}")
    env = Calculator(tasks=source)
    return [_demonstrate(env, source[rng.randrange(len(source))], noise, rng) for _ in range(n)]


def _demonstrate(env: Calculator, task: Task, noise: float, rng: random.Random) -> Transcript:
    first, answer = env.oracle(task)
    spoiled = rng.random() < noise
    if spoiled:
        first = _spoiled_call(str(task.meta.get("expression", task.answer)), rng)
    elif rng.random() < noise:
        answer = {"role": "assistant", "content": str(rng.randint(-99, 9999))}
    messages, _ = env.reset(options={"task": task})
    shown: list[Message] = [*messages, first]
    replies, _, ended, _, _ = env.step(first)
    call = env.calls[-1] if env.calls else None
    if not ended and call is not None and call.error is None:
        final = {"role": "assistant", "content": str(call.result)} if spoiled else answer
        shown += [*replies, final]
        env.step(final)
    elif not ended:
        env.finish(StopReason.ENV_DONE)  # the tool refused the call; the demonstration ends with what the policy wrote
    return {"messages": shown, "tools": list(env.tool_specs())}


def _spoiled_call(expression: str, rng: random.Random) -> Message:
    match rng.randrange(5):
        case 0:
            return calls(f"{rng.randint(0, 99)}{rng.choice('+-*')}{rng.randint(0, 99)}", call_id="call_1")
        case 1:
            return calls(expression, name="search", call_id="call_1")
        case 2:
            text = f'{{"name": "calculator", "arguments": {{"expression": "{expression}"'
        case 3:
            text = f"calculator({expression})"
        case _:
            text = str(rng.randint(0, 999))
    return {"role": "assistant", "content": text}
