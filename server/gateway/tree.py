"""The conversation tree of one session: which stored turn a request continues, if any.

In: a request's messages and tools. Out: the deepest stored turn whose conversation the request repeats, and the messages that are new. Two
requests with the same history are siblings; a request that repeats nothing stored starts a branch, with the reason on record. Messages are
compared by meaning, since agents replay them with other white space, without their reasoning, or with empty content as null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.server.renderer.base import text_of

Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Node:
    """One stored turn, with what a later request must repeat to continue it."""

    index: int
    parent: Node | None
    messages: tuple[Message, ...]
    """The request's messages after the parent's reply; all of them where parent is None."""
    reply: Message
    ids: list[int]
    """The whole prompt and completion, id for id."""
    tools: str
    """The tools as canonical JSON: they stand in the prompt, so they must not change."""
    children: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request stands in the tree."""

    base: Node | None
    """The turn that it continues; None: a full render."""
    new: tuple[Message, ...]
    """The messages to be rendered: those after the base's reply, or all."""
    fork_reason: str | None
    """Why a full render is needed although the session has turns; None otherwise."""


class ConversationTree:
    """All turns of a session that a request may continue."""

    def __init__(self) -> None:
        self.roots: list[Node] = []

    def add(self, node: Node) -> None:
        """Stores a turn under its parent."""
        (node.parent.children if node.parent is not None else self.roots).append(node)

    def remove(self, index: int) -> None:
        """Takes a turn out whose reply nobody received: no request can continue it."""
        stack = [self.roots]
        while stack:
            siblings = stack.pop()
            siblings[:] = [node for node in siblings if node.index != index]
            stack += [node.children for node in siblings]

    def match(self, messages: Sequence[Message], tools: str) -> Match:
        """The deepest turn that `messages` repeats whole, its reply included, with something new after it."""
        best: tuple[int, Node] | None = None
        tools_differ = False
        stack = [(node, 0) for node in self.roots]
        while stack:
            node, start = stack.pop()
            end = start + len(node.messages)
            if end >= len(messages) or not all(map(same_message, node.messages, messages[start:end])):
                continue
            if not same_message(node.reply, messages[end]):
                continue
            if node.tools != tools:
                tools_differ = True
                continue
            new = messages[end + 1 :]
            if new and all(m["role"] in ("user", "tool") for m in new) and (best is None or end > best[0]):
                best = (end, node)
            stack += [(child, end + 1) for child in node.children]
        if best is not None:
            end, node = best
            return Match(node, tuple(messages[end + 1 :]), None)
        if not self.roots:
            return Match(None, tuple(messages), None)
        if any(self._repeats_root(root, messages, tools) for root in self.roots):
            return Match(None, tuple(messages), "repeated_request")
        return Match(None, tuple(messages), "tools_changed" if tools_differ else "history_changed")

    @staticmethod
    def _repeats_root(root: Node, messages: Sequence[Message], tools: str) -> bool:
        same = len(root.messages) == len(messages) and root.tools == tools
        return same and all(map(same_message, root.messages, messages))


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools as text that is equal for equal tools."""
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False) if tools else ""


def same_message(stored: Message, echoed: Message) -> bool:
    """Whether an agent's replay means the same message. Null content is empty content; arguments are compared as JSON; reasoning that was
    left out counts as a match, reasoning that was changed does not."""
    if stored["role"] != echoed["role"] or text_of(stored) != text_of(echoed):
        return False
    if stored["role"] == "tool":
        one, other = stored.get("tool_call_id"), echoed.get("tool_call_id")
        return not one or not other or one == other
    if stored["role"] != "assistant":
        return True
    reasoning = echoed.get("reasoning_content")
    if reasoning and reasoning != stored.get("reasoning_content"):
        return False
    mine, theirs = stored.get("tool_calls") or (), echoed.get("tool_calls") or ()
    return len(mine) == len(theirs) and all(map(_same_call, mine, theirs))


def _same_call(stored: Message, echoed: Message) -> bool:
    one, other = stored["function"], echoed["function"]
    return bool(one["name"] == other["name"] and _parsed(one.get("arguments")) == _parsed(other.get("arguments")))


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
