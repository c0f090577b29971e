"""Transcripts of searches for supervised warm start: an oracle that errs on purpose.

An environment goes in, transcripts {"messages", "tools"} come out, as `tokenise` of supervised training wants them. Noise leaves the
model a spread of behaviour: one that was shown only perfect transcripts has nothing to learn from rewards.
"""

from __future__ import annotations

import random

from palestra.envs.demonstrations import Transcript
from palestra.envs.search.env import Search, calls
from palestra.envs.search.questions import TOPICS
from palestra.envs.types import Message, Task


def search_demonstrations(env: Search, n: int, noise: float = 0.0, seed: int = 0) -> list[Transcript]:
    """`n` transcripts of tasks of one hop, drawn from the environment's own.

    Args:
        noise: the chance that the search is spoiled (a call as plain text, one that is cut off, none), and, after a good one, that the
            answer is (without its tags, without its passage, with another one).

    Raises:
        ValueError: `noise` is no probability, or a task has two hops.
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise is a probability, got {noise}")
    rng = random.Random(f"demonstrations/{seed}")
    return [_demonstrate(env, env.tasks[rng.randrange(len(env.tasks))], noise, rng) for _ in range(n)]


def _demonstrate(env: Search, task: Task, noise: float, rng: random.Random) -> Transcript:
    if task.meta["hops"] != 1:
        raise ValueError(f"task {task.id!r} has two hops; demonstrations are made for questions of one")
    other = env.tasks[rng.randrange(len(env.tasks))]
    messages, _ = env.reset(options={"task": task})
    spoiled = rng.random() < noise
    right = _search(env, task)
    first = _spoiled_search(right, rng) if spoiled else right
    shown: list[Message] = [*messages, first]
    replies, _, ended, _, _ = env.step(first)
    if not ended:
        last = _spoiled_answer(task, other, rng) if rng.random() < noise else _answer(task)
        shown += [*replies, last]
        env.step(last)
    return {"messages": shown, "tools": list(env.tool_specs())}


def _search(env: Search, task: Task) -> Message:
    """Asks for the field and its country, or else as the question does; where neither finds the passage at once, opens it."""
    gold = task.meta["gold"][0]
    passage = env.corpus.get(gold)
    country = passage.title.partition(" | ")[0] if passage is not None else ""
    field = " ".join(TOPICS[task.meta["topic"]].path[1:])
    for query in (f"{field} {country}", str(task.prompt)):
        if [hit.id for hit in env.retriever.search(query, 1)] == [gold]:
            return calls("search", "call_1", query=query, k=1)
    return calls("open", "call_1", id=gold)


def _answer(task: Task) -> Message:
    return {"role": "assistant", "content": f"<answer>{task.answer}</answer> [{task.meta['gold'][0]}]"}


def _spoiled_search(right: Message, rng: random.Random) -> Message:
    """What is asked stays right, how is not: noise in the question itself would keep a small model from learning to read it."""
    function = right["tool_calls"][0]["function"]
    match rng.randrange(3):
        case 0:
            text = f"{function['name']}({function['arguments']})"
        case 1:
            text = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}'
        case _:
            text = "I do not know."
    return {"role": "assistant", "content": text}


def _spoiled_answer(task: Task, other: Task, rng: random.Random) -> Message:
    match rng.randrange(3):
        case 0:
            text = f"It is {task.answer}."
        case 1:
            text = f"<answer>{task.answer}</answer>"
        case _:
            text = f"<answer>{task.answer}</answer> [{other.meta['gold'][0]}]"
    return {"role": "assistant", "content": text}
