"""The conversation tree: what a request continues, by bytes and by meaning, and why it does not."""

from __future__ import annotations

import json
from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.gateway.tree import ConversationTree, Node, canonical_tools, same_ids, same_message
from palestra.server.types import SessionError

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "q"}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1e3, "b": "\\u5317"}'}}
    ],
}


def request(*messages: Message) -> bytes:
    return orjson.dumps(list(messages))


def put(
    tree: ConversationTree, index: int, raw: bytes, reply: Message, parent: Node | None = None, tools: str = ""
) -> Node:
    """Files a turn as the core does."""
    whole = json.loads(raw)
    before = len(parent.conversation()) if parent is not None else 0
    ids = array("i", [index])
    node = Node(index, parent, tuple(whole[before:]), reply, ids, ids, 0, tools, raw.rstrip()[:-1].rstrip(), 2, b"1,1")
    tree.add(node)
    return node


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def test_the_bytes_of_the_last_request_are_enough() -> None:
    tree = ConversationTree()
    first = put(tree, 0, request(USER), says("a"))
    more = {"role": "user", "content": "more"}
    match = tree.match(request(USER, says("a"), more), "")
    assert (match.base, match.new, match.fork_reason) == (first, (more,), None)


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "", "tool_calls": CALL["tool_calls"]},
        {"role": "assistant", "tool_calls": CALL["tool_calls"]},
        {**CALL, "content": []},
        {
            **CALL,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":"北","a":1000.0}'}}
            ],
        },
    ],
)
def test_an_echo_by_another_library_is_the_same_turn(echo: Message) -> None:
    """langchain#37960 and its kind: null and empty, numbers, escapes and order of arguments, no reasoning."""
    tree = ConversationTree()
    node = put(tree, 0, request(USER), {**CALL, "reasoning_content": "hm"})
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    spaced = json.dumps([USER, echo, result], indent=1).encode()
    assert tree.match(spaced, "").base is node
    assert tree.match(request(USER, echo, result), "").base is node


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "other"}, says("a"), USER], "new_conversation"),
        ([USER, says("b"), USER], "history_changed"),
        ([USER], "repeated_request"),
        ([USER, says("a", reasoning_content="another"), USER], "history_changed"),
    ],
)
def test_what_continues_nothing_says_why(messages: list[Message], reason: str) -> None:
    tree = ConversationTree()
    put(tree, 0, request(USER), says("a", reasoning_content="one"))
    assert tree.match(request(*messages), "").base is None
    assert tree.match(request(*messages), "").fork_reason == reason


def test_other_tools_are_another_prompt() -> None:
    tree = ConversationTree()
    put(tree, 0, request(USER), says("a"), tools="[1]")
    assert tree.match(request(USER, says("a"), USER), "[2]").fork_reason == "tools_changed"


def test_a_repeated_request_below_a_turn_is_its_sibling() -> None:
    """ProRL#37: two calls with identical prompts are siblings, never one after the other."""
    tree = ConversationTree()
    root = put(tree, 0, request(USER), says("a"))
    again = request(USER, says("a"), USER)
    child = put(tree, 1, again, says("b"), root)
    match = tree.match(again, "")
    assert (match.base, match.new) == (root, (USER,))
    put(tree, 2, again, says("b"), root)
    deeper = tree.match(request(USER, says("a"), USER, says("b"), USER), "")
    assert deeper.base is not None
    assert deeper.base.index == 2, "the newer of two equal replies"
    assert child.index == 1


def test_equal_replies_are_told_apart_by_their_call_ids() -> None:
    tree = ConversationTree()
    one = put(tree, 0, request(USER), CALL)
    other = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "c2"}]}
    two = put(tree, 1, request(USER), other)
    result = {"role": "tool", "content": "ok"}
    for spaced in (False, True):
        encode = (lambda m: json.dumps(m, indent=1).encode()) if spaced else orjson.dumps
        assert tree.match(encode([USER, CALL, result]), "").base is one
        assert tree.match(encode([USER, other, result]), "").base is two
    assert same_message(CALL, other)
    assert not same_ids(CALL, other)


def test_broken_arguments_that_a_client_mended_are_known_by_their_id() -> None:
    def with_arguments(text: str, call_id: str) -> Message:
        return {
            **CALL,
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": text}}],
        }

    tree = ConversationTree()
    node = put(tree, 0, request(USER), with_arguments('{"a": 1', "c1"))
    assert tree.match(request(USER, with_arguments('{"a": 1}', "c1"), USER), "").base is node
    assert tree.match(request(USER, with_arguments('{"a": 1}', "c2"), USER), "").base is None


def test_a_conversation_may_be_longer_than_a_stack_is_deep() -> None:
    tree, parent = ConversationTree(), None
    for index in range(3000):
        ids = array("i", [index])
        parent = Node(index, parent, (USER,), says(str(index)), ids, ids, 0, "")
        tree.add(parent)
    assert parent is not None
    assert parent.conversation() == [message for index in range(3000) for message in (USER, says(str(index)))]
    assert parent.ids() == [token for index in range(3000) for token in (index, index)]


def test_an_undelivered_reply_is_found_only_where_no_other_is() -> None:
    tree = ConversationTree()
    lost = put(tree, 0, request(USER), says("a"))
    lost.delivered = False
    assert tree.match(request(USER, says("a"), USER), "").base is lost
    kept = put(tree, 1, request(USER), says("a"))
    lost.index, kept.index = 5, 1
    assert tree.match(request(USER, says("a"), USER), "").base is kept


def test_the_deepest_turn_wins_over_a_newer_shallow_one() -> None:
    tree = ConversationTree()
    root = put(tree, 0, request(USER), says("a"))
    deep_request = request(USER, says("a"), USER)
    deep = put(tree, 1, deep_request, says("b"), root)
    put(tree, 2, request(USER), says("a"))
    assert tree.match(request(USER, says("a"), USER, says("b"), USER), "").base is deep


def test_storage_is_linear_only_branch_ends_keep_their_bytes() -> None:
    tree = ConversationTree()
    parent, messages = None, [USER]
    for index in range(50):
        parent = put(tree, index, request(*messages), says(str(index)), parent)
        messages = [*messages, says(str(index)), USER]
    nodes = [tree.find(i) for i in range(50)]
    assert [node.index for node in nodes if node is not None and node.raw is not None] == [49]
    for index in range(50, 120):
        put(tree, index, request({"role": "user", "content": str(index)}), says("x"))
    assert sum(node.raw is not None for i in range(120) if (node := tree.find(i)) is not None) == 16
    assert tree.match(request(*messages), "").base is parent, "found by meaning, without its bytes"


@pytest.mark.parametrize(
    "raw", [b"[", b"{}", b"[1]", b'[{"role": "robot"}]', b"[" * 20_000, b'[{"role": "user", "content": 3}]']
)
def test_what_is_no_list_of_messages_is_refused(raw: bytes) -> None:
    with pytest.raises(SessionError):
        ConversationTree().match(raw, "")


@pytest.mark.parametrize("raw", [b"[", b"{}", b'[{"type": "function"}]', b'[{"type": "web_search"}]', b"[" * 20_000])
def test_what_is_no_list_of_tools_is_refused(raw: bytes) -> None:
    with pytest.raises(SessionError, match="tools"):
        canonical_tools(raw)


texts = st.text(max_size=6)
replies = st.one_of(
    texts.map(says),
    st.builds(
        lambda name, value: {
            **CALL,
            "tool_calls": [{"id": name, "function": {"name": name, "arguments": json.dumps(value)}}],
        },
        st.sampled_from(["f", "g"]),
        st.dictionaries(texts, st.integers() | texts, max_size=2),
    ),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(texts, replies), min_size=1, max_size=5), st.randoms())
def test_a_conversation_goes_on_however_it_is_written(turns: list[tuple[str, Message]], random: Any) -> None:
    """Law 1's first half: every next request of an honest client continues the turn before it."""
    tree, messages, parent = ConversationTree(), list[Message](), None
    for index, (text, reply) in enumerate(turns):
        messages.append({"role": "user", "content": text})
        written = (
            orjson.dumps(messages)
            if random.random() < 0.5
            else json.dumps(messages, indent=random.choice([0, 2])).encode()
        )
        match = tree.match(written, "")
        assert match.base is parent
        assert match.new == (messages[-1],)
        parent = put(tree, index, written, reply, parent)
        messages.append(reply)
