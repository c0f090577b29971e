"""What holds for every dialect whatever the input: a body gives a call or a SessionError, and a stream's deltas are the whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.gateway.dialects.reading import check_messages, check_tools, decode_list
from palestra.server.gateway.dialects.sse import TokenDealer, pieces
from palestra.server.gateway.openapi import MODEL_ROUTES
from palestra.server.gateway.types import Choice, Dialect, ModelCall
from palestra.server.types import SessionError
from tests.dialects_app import DIALECTS, nothing_recalled, replied, say, tokens_of

SOME = settings(max_examples=25, derandomize=True, deadline=None)
counted = pytest.mark.parametrize("examples", [15, pytest.param(800, marks=pytest.mark.full)])
every_dialect = pytest.mark.parametrize("path", DIALECTS)

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
anything = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))
words = ["message", "reasoning", "function_call", "function_call_output", "text", "tool_use", "tool_result", "thinking"]
words += ["function", "allowed_tools", "auto", "required", "any", "tool", "json_schema", "enabled", "x"]
keys = ["type", "role", "content", "text", "name", "function", "arguments", "call_id", "id", "output", "input", "tools"]
keys += ["tool_calls", "tool_use_id", "summary", "thinking", "schema", "json_schema", "mode", "input_schema", "effort"]
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
near = st.recursive(
    leaves | st.sampled_from(words) | roles,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(keys), v, max_size=5),
    max_leaves=6,
)
"""Values that are almost right."""


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the fields of one API, under values that are almost right."""
    names = MODEL_ROUTES[path].__struct_fields__
    main = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    item = st.fixed_dictionaries({"role": roles, "content": near}) | st.dictionaries(st.sampled_from(keys), near)
    rest = st.dictionaries(st.sampled_from(names), near, max_size=4)
    return st.builds(lambda most, value: {main: value, **most}, rest, st.lists(item, min_size=1, max_size=3) | near)


def read(dialect: Dialect, body: bytes) -> ModelCall | None:
    """The call, or None where the body was refused in order."""
    try:
        call = dialect.read(body, nothing_recalled)
        messages = decode_list(call.messages, "messages") if call.messages else []
        check_messages(messages)
        check_tools(decode_list(call.tools, "tools") if call.tools else [])
    except SessionError as error:
        refused = error
    else:
        assert messages or call.prompt
        assert call.n >= 1
        return call
    assert refused.status in (400, 404)
    assert str(refused)
    return None


@counted
@every_dialect
def test_any_bytes_and_any_json(path: str, examples: int) -> None:
    @settings(SOME, max_examples=examples)
    @given(body=st.binary(max_size=60) | anything.map(msgspec.json.encode))
    def check(body: bytes) -> None:
        read(DIALECTS[path], body)

    check()


@counted
@every_dialect
def test_bodies_that_are_almost_right(path: str, examples: int) -> None:
    dialect = DIALECTS[path]

    @settings(SOME, max_examples=examples)
    @given(body=bodies(path).map(msgspec.json.encode))
    def check(body: bytes) -> None:
        call = read(dialect, body)
        if call is not None:
            orjson.dumps(dialect.reply(call, replied(say("fine"))))

    check()


@every_dialect
@pytest.mark.parametrize(
    "value",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'[{"role":"user","content":' + b"[" * 600 + b"]" * 600 + b"}]",
        b'[{"role":"user","content":"\xff"}]',
        b"NaN",
        b"1e999",
        b"9" * 5_000,
        b"",
    ],
)
def test_bodies_that_break_parsers(path: str, value: bytes) -> None:
    main = {"/v1/completions": b"prompt", "/v1/responses": b"input"}.get(path, b"messages")
    assert read(DIALECTS[path], b'{"model":"m","%s":%s}' % (main, value)) is None
    good = {b"prompt": b'"a"', b"input": b'"a"', b"messages": b'[{"role":"user","content":"a"}]'}[main]
    for field in (b"temperature", b"max_tokens", b"seed", b"tools", b"logit_bias", b"unknown"):
        read(DIALECTS[path], b'{"%s":%s,"%s":%s}' % (main, good, field, value))


@SOME
@given(text=st.text() | st.text(alphabet=" \n\ta", max_size=200))
def test_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(len(piece) <= 64 for piece in pieces(text))


@SOME
@given(text=st.text(), tokens=st.text(max_size=60).map(tokens_of))
def test_every_token_is_dealt_once_and_in_order(text: str, tokens: Any) -> None:
    dealer = TokenDealer(tokens)
    dealt = [token for piece in pieces(text) for token in dealer.take(piece)]
    assert (*dealt, *dealer.rest()) == tokens


arguments = st.dictionaries(st.text(max_size=4), anything, max_size=3).map(lambda v: msgspec.json.encode(v).decode())
choices = st.builds(
    lambda content, reasoning, calls, reason: say(
        content,
        reasoning=reasoning,
        calls=[(f"call_{i}", name, args) for i, (name, args) in enumerate(calls)],
        **reason,
    ),
    st.text(max_size=40),
    st.text(max_size=40),
    st.lists(st.tuples(st.text(min_size=1, max_size=5), arguments | st.text(max_size=9)), max_size=3),
    st.sampled_from([{}, {"finish_reason": "length"}]),
)


def events_of(dialect: Dialect, call: ModelCall, choice: Choice) -> Iterator[Any]:
    """The data of every event, each known to be one well-formed event."""
    for event in dialect.events(call, replied(choice)):
        *head, data, end, last = event.split(b"\n")
        assert (end, last) == (b"", b"")
        assert [line[:7] for line in head] in ([], [b"event: "])
        assert data.startswith(b"data: ")
        if data != b"data: [DONE]":
            yield orjson.loads(data[6:])


def joined_chat(events: Iterator[Any]) -> dict[str, Any]:
    """The message that a chat stream spells."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({**call["function"], "id": call["id"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    """A choice's message in the form of `joined_chat`."""
    calls = [{**call["function"], "id": call["id"]} for call in message.get("tool_calls") or ()]
    return {
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
    }


@SOME
@given(choice=choices, logprobs=st.booleans())
def test_chat_deltas_are_the_whole_answer(choice: Choice, logprobs: bool) -> None:
    dialect = DIALECTS["/v1/chat/completions"]
    call = ModelCall(b"[]", stream=True, logprobs=logprobs, include_usage=True)
    events = list(events_of(dialect, call, choice))
    assert joined_chat(iter(events)) == spoken(choice.message)
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    plain = orjson.loads(orjson.dumps(dialect.reply(call, replied(choice))))
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], plain["usage"])
    shown = [lp for e in events for c in e["choices"] for lp in (c["logprobs"] or {"content": []})["content"]]
    assert shown == ((plain["choices"][0]["logprobs"] or {"content": []})["content"])


@SOME
@given(choice=choices)
def test_responses_deltas_are_the_whole_answer(choice: Choice) -> None:
    dialect, call = DIALECTS["/v1/responses"], read(DIALECTS["/v1/responses"], b'{"input":"a"}')
    assert call is not None
    events = list(events_of(dialect, call, choice))
    whole = orjson.loads(orjson.dumps(dialect.reply(call, replied(choice))))
    assert events[-1]["response"] == whole
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == whole["output"]
    for index, item in enumerate(whole["output"]):
        deltas = "".join(e["delta"] for e in events if e.get("output_index") == index and "delta" in e)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@SOME
@given(choice=choices)
def test_messages_deltas_are_the_whole_answer(choice: Choice) -> None:
    dialect, call = DIALECTS["/v1/messages"], ModelCall(b"[]", stream=True)
    events = list(events_of(dialect, call, choice))
    whole = orjson.loads(orjson.dumps(dialect.reply(call, replied(choice))))
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == [block["type"] for block in whole["content"]]
    for index, block in enumerate(whole["content"]):
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
        if block["type"] == "tool_use":
            assert orjson.loads("".join(d["partial_json"] for d in deltas) or "{}") == block["input"]
        else:
            assert "".join(d.get(block["type"], "") for d in deltas) == block[block["type"]]
    (last,) = [e for e in events if e["type"] == "message_delta"]
    assert (last["delta"]["stop_reason"], last["usage"]) == (whole["stop_reason"], whole["usage"])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("x", r"messages\[4\] must be an object, got a string"),
        ({"role": "bot"}, r"messages\[4\].role is 'bot'"),
        ({"content": "x"}, r"messages\[4\].role is None"),
        ({"role": "user", "content": 3}, r"messages\[4\].content must be a string or an array of parts, got a number"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[4\].content\[0\].type is 'image_url'"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            r"messages\[4\].content\[0\].text must be a string, got null",
        ),
        ({"role": "tool", "tool_call_id": 3}, r"messages\[4\].tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, r"messages\[4\].tool_calls must be an array, got an object"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[4\].tool_calls\[0\].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"function.name must be a string, got null"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "function.arguments"),
        ({"role": "assistant", "reasoning_content": []}, r"messages\[4\].reasoning_content"),
    ],
)
def test_messages_are_checked_in_depth(message: Any, why: str) -> None:
    with pytest.raises(SessionError, match=why):
        check_messages([message], 4)


def test_messages_that_agents_really_send_pass() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    check_messages(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "function_call": None},
            {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "c"},
            {"role": "assistant", "tool_calls": None},
        ]
    )
