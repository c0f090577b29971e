"""Over-sampling with dynamic filtering, written as one function: prompts are played until a batch of groups has something to learn from.

`rollout.function` names it. It runs in the worker, on an event loop of its own; every model call goes through the official client.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from palestra.envs.arithmetic import evaluate
from palestra.envs.calculator import read_answer

MAX_CALLS = 3


async def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> list[Any]:
    """Groups with different rewards, as many as a batch has; an evaluation keeps them all."""
    valid: list[list[Any]] = []
    while len(valid) < args.rollout_batch_size:
        prompts = await data_buffer.get_samples(args.rollout_batch_size - len(valid))
        groups = await asyncio.gather(*(group_of(prompt, args) for prompt in prompts))
        for prompt, group in zip(prompts, groups, strict=True):
            if len({sample.reward for sample in group}) > 1 or evaluation:
                valid.append(group)
            else:
                data_buffer.drop(prompt, "zero_variance" if group else "failed")  # its place is free again at once
    return [sample for group in valid for sample in group]


async def group_of(prompt: Any, args: Any) -> list[Any]:
    """The samples of one prompt; a rollout that failed gives none."""
    samples = await asyncio.gather(*(play(prompt, args) for _ in range(prompt.n_samples)))
    return [sample for sample in samples if sample is not None]


async def play(prompt: Any, args: Any) -> Any:
    """One rollout: a loop over the model's calls of the calculator, and a score of our own."""
    async with prompt.rollout() as rollout:
        messages, called = prompt.messages, False
        for turn in range(MAX_CALLS):
            reply = await rollout.client.chat.completions.create(
                model="policy", messages=messages, tools=prompt.tools, max_tokens=args.max_response
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            results = [answer(call) for call in message.tool_calls or ()]
            if not results or turn == MAX_CALLS - 1:
                break
            called = called or any(not result["content"].startswith("Error") for result in results)
            messages += results
        right = read_answer(messages[-1].get("content") or "") == prompt.task.answer
        length = sum(sum(row.loss_mask) for row in await rollout.rows())
        reward = 0.5 * right + 0.4 * called + 0.1 * (1 - length / (MAX_CALLS * args.max_response))
        return await rollout.sample(reward, components={"right": float(right), "called": float(called)})


def answer(call: Any) -> dict[str, Any]:
    """The tool's message."""
    try:
        content = str(evaluate(str(json.loads(call.function.arguments)["expression"])))
    except (ValueError, KeyError, TypeError) as error:
        content = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}
