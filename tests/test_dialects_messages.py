"""Anthropic's messages on the wire, through the official `anthropic` client and LangChain."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from palestra.server.gateway.dialects.messages import MessagesDialect
from palestra.server.gateway.types import ModelCall
from palestra.server.types import EngineError, SessionError, StoreError
from tests.dialects_app import Service, nothing_recalled, replied, say

ADD: Any = {"name": "add", "description": "Sums.", "input_schema": {"type": "object"}}
CALLS = (("call_a", "add", '{"a": 2, "b": [2, {"c": 3}]}'), ("call_b", "add", ""))
FULL = say("Let me add.", reasoning="hm, sums", calls=CALLS)
USER: list[Any] = [{"role": "user", "content": "2+2?"}]


def read(messages: Any = USER, **fields: Any) -> ModelCall:
    body = orjson.dumps({"model": "policy", "max_tokens": 9, "messages": messages, **fields})
    return MessagesDialect().read(body, nothing_recalled)


def said(call: ModelCall) -> Any:
    return orjson.loads(call.messages)


def function(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_reply_of_every_kind_of_block_and_its_way_back() -> None:
    service = Service(replied(FULL))
    done = await service.anthropic.messages.create(
        model="policy",
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief."}],
        messages=USER,
        tools=[ADD],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0.7, "top_k": 4},
    )
    assert (done.id, done.stop_reason, done.stop_sequence) == ("msg_r7-3", "tool_use", None)
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (done.usage.input_tokens, done.usage.cache_read_input_tokens, done.usage.output_tokens) == (36, 64, 20)
    call = service.call
    assert (call.thinking, call.tool_choice, call.parallel_tool_calls) == (True, "required", False)
    assert (call.max_tokens, call.sampling.temperature, call.sampling.top_k) == (50, 0.7, 4)
    assert orjson.loads(call.tools) == [
        {"type": "function", "function": {"name": "add", "description": "Sums.", "parameters": {"type": "object"}}}
    ]
    back: list[Any] = [
        *USER,
        {"role": "assistant", "content": done.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_a", "content": "4"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_b",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    await service.anthropic.messages.create(model="policy", max_tokens=50, system="Be brief.", messages=back)
    system, _, reply, *rest = said(service.call)
    assert system == {"role": "system", "content": "Be brief."}
    assert (reply["content"], reply["reasoning_content"]) == ("Let me add.", "hm, sums")
    assert [orjson.loads(c["function"]["arguments"]) for c in reply["tool_calls"]] == [{"a": 2, "b": [2, {"c": 3}]}, {}]
    assert rest == [
        {"role": "tool", "tool_call_id": "call_a", "content": "4"},
        {"role": "tool", "tool_call_id": "call_b", "content": "no"},
        {"role": "user", "content": "Go on."},
    ]


async def test_the_stream_helper_builds_what_the_plain_call_gives() -> None:
    service = Service(replied(FULL))
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "messages": USER, "tools": [ADD]}
    plain = await service.anthropic.messages.create(**asked)
    async with service.anthropic.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream if event.type.startswith(("message", "content_block"))]
        final = await stream.get_final_message()
    assert final.model_dump(exclude={"parsed_output"}, exclude_none=True) == plain.model_dump(exclude_none=True)
    assert [kind for at, kind in enumerate(kinds) if kind not in kinds[at - 1 : at]] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        *("content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize("arguments", ['{"a": 2,', "[1]", "NaN"])
async def test_arguments_that_are_no_object_keep_their_text(arguments: str) -> None:
    service = Service(replied(say(calls=(("call_a", "add", arguments),))))
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "tools": [ADD]}
    done = await service.anthropic.messages.create(**asked, messages=USER)
    async with service.anthropic.messages.stream(**asked, messages=USER) as stream:
        final = await stream.get_final_message()
    for message in (done, final):
        block: Any = message.content[0]
        assert block.input == {"unparsed_arguments": arguments}
    back: Any = [*USER, {"role": "assistant", "content": done.content}, *USER]
    await service.anthropic.messages.create(**asked, messages=back)
    assert said(service.call)[1]["tool_calls"] == [function("add", arguments, "call_a")]


@pytest.mark.parametrize(
    ("choice", "reason", "text"),
    [
        (say("a"), "end_turn", None),
        (say("a", finish_reason="length"), "max_tokens", None),
        (say("a", stop_text="END"), "stop_sequence", "END"),
        (say(""), "end_turn", None),
    ],
)
async def test_why_a_reply_ended(choice: Any, reason: str, text: str | None) -> None:
    service = Service(replied(choice))
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 5, "messages": USER, "stop_sequences": ["END"]}
    done = await service.anthropic.messages.create(**asked)
    async with service.anthropic.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert (done.stop_reason, done.stop_sequence) == (final.stop_reason, final.stop_sequence) == (reason, text)
    assert service.call.stop == ("END",)


async def test_errors_as_the_client_raises_them() -> None:
    service = Service(SessionError("no room", 400, "context_length_exceeded"))
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 5, "messages": USER}
    kinds = [
        (SessionError("no room", 400, "context_length_exceeded"), anthropic.BadRequestError, "invalid_request_error"),
        (SessionError("key", 401, "invalid_api_key"), anthropic.AuthenticationError, "authentication_error"),
        (SessionError("lost", 404, "not_found"), anthropic.NotFoundError, "not_found_error"),
        (SessionError("closed", 409, "session_closed"), anthropic.ConflictError, "conflict_error"),
        (EngineError("gone"), anthropic.APIStatusError, "api_error"),
        (StoreError("full"), anthropic.InternalServerError, "api_error"),
    ]
    for error, kind, named in kinds:
        service.reply = error
        with pytest.raises(kind) as raised:
            await service.anthropic.messages.create(**asked)
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"], body["error"]["message"]) == ("error", named, str(error))
    service.reply, service.late = EngineError("gone"), True
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        async with service.anthropic.messages.stream(**asked) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize(
    ("messages", "fields", "why"),
    [
        ([], {}, "messages is empty"),
        ([{"role": "tool", "content": "x"}], {}, r"messages\[0\].role is 'tool'"),
        ([{"role": "user"}], {}, r"messages\[0\].content must be"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, r"messages\[0\].content\[0\].type is 'image'"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ],
            {},
            r"content\[0\].content\[0\].type is 'image'",
        ),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], {}, r"content\[0\].tool_use_id"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}], {}, r"content\[0\].input"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}], {}, "'server_tool_use'"),
        (USER, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type is 'bash_20250124'"),
        (USER, {"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
        (USER, {"tools": [ADD], "tool_choice": {"type": "tool", "name": "g"}}, "'g', which is none"),
        (USER, {"tools": [ADD], "tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        (USER, {"tool_choice": {"type": "any"}}, "holds no tools"),
        (USER, {"thinking": {"type": "much"}}, "thinking.type is 'much'"),
        (USER, {"max_tokens": 0}, r"\$\.max_tokens"),
        (USER, {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
    ],
)
def test_what_is_refused_and_where(messages: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(SessionError, match=why) as refused:
        read(messages, **fields)
    assert refused.value.status == 400


def test_what_the_fields_mean() -> None:
    prefill = [*USER, {"role": "assistant", "content": "It is"}]
    assert said(read(prefill))[-1] == {"role": "assistant", "content": "It is"}
    for kind, thinking in (("disabled", False), ("adaptive", None), ("enabled", True)):
        assert read(thinking={"type": kind}).thinking is thinking
    assert read(tools=[ADD], tool_choice={"type": "none"}).tool_choice == "none"
    assert read(tools=[ADD], tool_choice={"type": "tool", "name": "add"}).tool_choice == "=add"
    wish = {"effort": "xhigh", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert (read(output_config=wish).effort, read(output_config=wish).response_schema) == ("high", {"type": "object"})
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said(read([{"role": "user", "content": texts}])) == [{"role": "user", "content": parts}]
    inside = [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "c"}]
    assert [m["role"] for m in said(read([{"role": "user", "content": inside}]))] == ["user", "tool"]


def test_the_line_that_changes_with_every_request_is_no_part_of_the_conversation() -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
    blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent."}]
    for system in (blocks, f"{billing}\nYou are an agent."):
        assert said(read(system=system))[0] == {"role": "system", "content": "You are an agent."}
    assert said(read(system=billing))[0]["role"] == "user"


class Answer(BaseModel):
    """The sum."""

    value: int


async def test_langchain() -> None:
    service = Service(replied(FULL))
    model = ChatAnthropic(model="policy", api_key="key", max_retries=0, timeout=None, stop=None)
    model.__dict__["_async_client"] = service.anthropic
    bound = model.bind_tools([ADD])
    history: list[BaseMessage] = [HumanMessage("2+2?")]
    reply = await bound.ainvoke(history)
    assert isinstance(reply, AIMessage)
    assert [call["args"] for call in reply.tool_calls] == [{"a": 2, "b": [2, {"c": 3}]}, {}]
    history += [reply, ToolMessage("4", tool_call_id="call_a"), ToolMessage("1", tool_call_id="call_b")]
    service.reply = replied(say("Four."))
    assert (await bound.ainvoke(history)).text == "Four."
    assert [m["role"] for m in said(service.call)] == ["user", "assistant", "tool", "tool"]
    assert said(service.call)[1]["reasoning_content"] == "hm, sums"
    parts = [chunk async for chunk in bound.astream("2+2?")]
    assert "".join(part.text for part in parts) == "Four."
    service.reply = replied(say(calls=(("call_a", "Answer", '{"value": 4}'),)))
    assert await model.with_structured_output(Answer).ainvoke("2+2?") == Answer(value=4)
    assert service.call.tool_choice == "=Answer"
