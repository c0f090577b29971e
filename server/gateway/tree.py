"""The conversation tree of one session: which stored turn a request continues, if any.

In: a request's messages (raw JSON) and tools. Out: the deepest stored turn whose conversation the request repeats, and the messages that
are new. Two requests with the same history are siblings; a request that repeats nothing stored starts a branch, with the reason on record.
Messages are compared by meaning, since agents replay them with other white space, without their reasoning, or with empty content as null;
most clients repeat their own bytes, though, so the bytes are compared first and a turn costs nothing per turn before it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from palestra.server.engine_wire import Prompt
from palestra.server.gateway.dialects.reading import check_messages, check_tools, mended
from palestra.server.renderer.text import text_of
from palestra.server.types import RenderError, SessionError

Message = Mapping[str, Any]
RECENT = 16
"""Branch ends whose raw bytes are kept: a conversation with more open branches than that is compared by meaning."""
RAW_TOOLS = "\0raw"
"""Stands for the tools of turns made by /v1/completions: they have no messages, and continue each other only."""
_decode = msgspec.json.Decoder(list[dict[str, Any]]).decode


@dataclass(slots=True, eq=False)
class Node:
    """One stored turn, with what a later request must repeat to continue it."""

    index: int
    parent: Node | None
    messages: tuple[Message, ...]
    """The request's messages after the parent's reply; all of them where parent is None."""
    reply: Message
    """As the caller has it."""
    delta: array[int]
    """Prompt ids after the parent's completion; the whole prompt where parent is None."""
    completion: array[int]
    opened: int
    """Trailing ids of delta that belong to the assistant's turn already."""
    tools: str
    """The tools as canonical JSON: they stand in the prompt, so they must not change."""
    raw: bytes | None = None
    """The request's messages as they came, without the closing bracket; only while this is one of the newest branch ends."""
    length: int = 0
    """Ids of prompt and completion."""
    joined: bytes | None = None
    """All ids up to the completion's end as JSON, like `raw` only at branch ends: storage grows with new tokens only."""
    delivered: bool = True
    followed: bool = False
    """A caller went on from it, so it has the reply, whatever becomes of the connection that brought it."""
    text: str | None = None
    """Prompt and completion as text, where the prompt came as text (/v1/completions)."""
    children: list[Node] = field(default_factory=list)

    def prompt(self) -> Prompt:
        """Prompt and completion as the beginning of the next prompt."""
        return Prompt(self.joined, self.length) if self.joined is not None else Prompt.of(self.ids())

    def ids(self) -> list[int]:
        """Prompt and completion, id for id."""
        return [token for node in self._path() for part in (node.delta, node.completion) for token in part]

    def conversation(self) -> list[Message]:
        """All messages from the first one to this reply."""
        return [message for node in self._path() for message in (*node.messages, node.reply)]

    def _path(self) -> list[Node]:
        """From the first turn to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


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
        self._ends: list[Node] = []
        """Branch ends with their raw bytes, newest last."""
        self._by_index: dict[int, Node] = {}
        self._raw: list[Node] = []

    @property
    def has_raw(self) -> bool:
        """Whether it has turns of /v1/completions."""
        return bool(self._raw)

    def longest_raw(self, begins: Callable[[Node], bool]) -> Node | None:
        """Of the turns of /v1/completions that a prompt begins with, the longest."""
        return max((node for node in self._raw if begins(node)), key=lambda n: (n.length, n.delivered), default=None)

    def add(self, node: Node) -> None:
        """Stores a turn under its parent."""
        self._by_index[node.index] = node
        if node.tools == RAW_TOOLS:
            self._raw.append(node)
            if node.parent is not None:  # found by its child now
                node.parent.joined = node.parent.text = None
            return
        (node.parent.children if node.parent is not None else self.roots).append(node)
        if node.parent is not None and node.parent in self._ends:
            self._forget(node.parent)
        self._ends.append(node)
        if len(self._ends) > RECENT:
            self._forget(self._ends[0])

    def _forget(self, node: Node) -> None:
        node.raw = node.joined = None
        self._ends.remove(node)

    def find(self, index: int) -> Node | None:
        """The turn of that index."""
        return self._by_index.get(index)

    def match(self, raw: bytes, tools: str) -> Match:
        """The deepest turn that `raw` (a JSON array of messages) repeats whole, its reply included, with something new after it.

        Raises:
            SessionError: 400, the messages are not of OpenAI's form.
        """
        return self._by_bytes(raw, tools) or self._by_meaning(read_messages(raw), tools)

    def _by_bytes(self, raw: bytes, tools: str) -> Match | None:
        """Where the request begins with the very bytes of an earlier one, and goes on with that one's reply."""
        found = [
            node
            for node in self._ends
            if node.raw is not None and node.delivered and node.tools == tools and raw.startswith(node.raw)
        ]
        best: Match | None = None
        for node in sorted(found, key=lambda node: (-len(node.raw or b""), -node.index)):
            rest = raw[len(node.raw or b"") :].lstrip()
            if rest[:1] != b",":
                continue
            more = read_messages(b"[" + rest[1:], len(node.messages))
            if len(more) > 1 and same_message(node.reply, more[0]):
                match = Match(node, tuple(more[1:]), None)
                if same_ids(node.reply, more[0]):
                    return match
                best = best or match
        return best

    def _by_meaning(self, messages: Sequence[Message], tools: str) -> Match:
        best: tuple[tuple[int, bool, bool, int], Node] | None = None
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
            rank = (end, node.delivered, same_ids(node.reply, messages[end]), node.index)
            if end + 1 < len(messages) and (best is None or rank > best[0]):
                best = (rank, node)
            stack += [(child, end + 1) for child in node.children]
        if best is not None:
            (end, *_), node = best
            return Match(node, tuple(messages[end + 1 :]), None)
        return Match(None, tuple(messages), self._why(messages, tools, tools_differ))

    def _why(self, messages: Sequence[Message], tools: str, tools_differ: bool) -> str | None:
        if not self.roots:
            return None
        if any(self._repeats_root(root, messages, tools) for root in self.roots):
            return "repeated_request"
        if tools_differ:
            return "tools_changed"
        begun = any(same_message(root.messages[0], messages[0]) for root in self.roots if root.messages)
        return "history_changed" if begun else "new_conversation"

    @staticmethod
    def _repeats_root(root: Node, messages: Sequence[Message], tools: str) -> bool:
        same = len(root.messages) == len(messages) and root.tools == tools
        return same and all(map(same_message, root.messages, messages))


def read_messages(raw: bytes, start: int = 0) -> list[dict[str, Any]]:
    """A JSON array of messages, checked. `start`: how many messages came before, for error messages.

    Raises:
        SessionError: 400.
    """
    try:
        messages = mended(_decode, raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SessionError(f"messages: {error}") from None
    check_messages(messages, start)
    return messages


def canonical_tools(raw: bytes) -> tuple[str, list[dict[str, Any]]]:
    """A JSON array of tools as text that is equal for equal tools, and its value.

    Raises:
        SessionError: 400, it is no list of tools.
    """
    if not raw:
        return "", []
    try:
        tools = mended(_decode, raw)
        text = json.dumps(tools, sort_keys=True, ensure_ascii=False) if tools else ""
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise SessionError(f"tools: {error}") from None
    check_tools(tools)
    return text, tools


def same_message(stored: Message, echoed: Message) -> bool:
    """Whether an agent's replay means the same message. Null content is empty content; arguments are compared as JSON; reasoning that was
    left out counts as a match, reasoning that was changed does not."""
    if _role(stored) != _role(echoed):
        return False
    one, other = _text(stored), _text(echoed)
    if one != other:
        if stored["role"] != "assistant" or not isinstance(one, str) or not isinstance(other, str):
            return False
        if one.strip() != other.strip():  # agents trim what the model said
            return False
    if stored["role"] == "tool":
        mine, theirs = stored.get("tool_call_id"), echoed.get("tool_call_id")
        return not mine or not theirs or mine == theirs
    if stored["role"] != "assistant":
        return True
    reasoning = echoed.get("reasoning_content")
    if reasoning and reasoning != stored.get("reasoning_content"):
        return False
    calls, echoes = stored.get("tool_calls") or (), echoed.get("tool_calls") or ()
    return len(calls) == len(echoes) and all(map(_same_call, calls, echoes))


def same_ids(stored: Message, echoed: Message) -> bool:
    """Whether the tool calls of two equal messages have equal ids too: of several equal replies, the one that is meant."""
    calls, echoes = stored.get("tool_calls") or (), echoed.get("tool_calls") or ()
    return all(one.get("id") == other.get("id") for one, other in zip(calls, echoes, strict=False))


def _role(message: Message) -> str:
    role = str(message["role"])
    return "system" if role == "developer" else role


def _text(message: Message) -> Any:
    """Text, or the parts themselves where they cannot be text: those are refused when they are rendered."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return text_of(message)
    except RenderError:
        return content


def _same_call(stored: Message, echoed: Message) -> bool:
    one, other = stored["function"], echoed["function"]
    if one["name"] != other["name"]:
        return False
    mine, theirs = _parsed(one.get("arguments")), _parsed(other.get("arguments"))
    # Broken arguments are mended by some clients before they are sent back: then the id says which call it was.
    return bool(mine == theirs or (isinstance(mine, str) and stored.get("id") and stored["id"] == echoed.get("id")))


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
