"""Reads a session's conversation: which branch is scored, what of it came after the prompt, and how many model calls there were.

Branches of messages go in, as the service tells them; nothing is waited for. Agents write messages in their own way (content as parts,
fields left out), so messages are compared by role and text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from palestra.envs.types import Message


def main_branch(branches: Sequence[Sequence[Message]]) -> Sequence[Message]:
    """The branch with the most replies, the last of those that have as many; empty where nothing was said.

    A sub-agent's branch is shorter than that of the agent that called it, and what was begun anew ends last.
    """
    best: Sequence[Message] = ()
    for branch in branches:
        if _replies(branch) >= _replies(best):
            best = branch
    return best


def after_prompt(branch: Sequence[Message], prompt: Sequence[Message]) -> list[Message]:
    """What came after the prompt. Where the branch begins with `prompt`, system messages aside, that is the prompt; an agent that wrote one
    of its own: what stands before the first reply.
    """
    rest, given = _without_system(branch), _without_system(prompt)
    if len(rest) >= len(given) and all(_same(a, b) for a, b in zip(rest, given, strict=False)):
        return list(rest[len(given) :])
    first = next((at for at, message in enumerate(rest) if message.get("role") == "assistant"), len(rest))
    return list(rest[first:])


def count_turns(branches: Sequence[Sequence[Message]], prompt: Sequence[Message]) -> int:
    """Model calls of all branches. A beginning that several share counts once, and so does a reply that an agent sends back in other words
    (clients mend broken arguments of a call) and that therefore begins a branch.
    """
    turns: set[tuple[object, ...]] = set()
    for number, branch in enumerate(branches):
        start = len(branch) - len(after_prompt(branch, prompt))
        opening = text_of(branch[start - 1]) if start else ""
        path, last = 0, len(branch) - 1
        if not branch:  # of a call that had text or ids for a prompt, and no messages
            turns.add((number,))
        for at, message in enumerate(branch):
            path = hash((path, json.dumps(message, sort_keys=True, default=str)))
            if at < start or message.get("role") != "assistant":
                continue
            named = tuple(call.get("id") for call in message.get("tool_calls") or ())
            if named:
                turns.add((opening, at, *named))
            else:  # every branch ends in a reply of its own, also where two calls were answered alike
                turns.add((path, number if at == last else -1))
    return len(turns)


def text_of(message: Message) -> str:
    """A message's text, also where it comes in parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _replies(branch: Sequence[Message]) -> int:
    return sum(message.get("role") == "assistant" for message in branch)


def _without_system(messages: Sequence[Message]) -> Sequence[Message]:
    start = next((at for at, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    return messages[start:]


def _same(left: Message, right: Message) -> bool:
    return left.get("role") == right.get("role") and text_of(left) == text_of(right)
