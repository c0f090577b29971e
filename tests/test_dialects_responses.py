"""The Responses API on the wire, through the official `openai` client and LangChain."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from palestra.server.gateway.dialects.responses import ResponsesDialect
from palestra.server.gateway.types import ModelCall
from palestra.server.types import EngineError, SessionError
from tests.dialects_app import Service, nothing_recalled, replied, say

ADD: Any = {"type": "function", "name": "add", "description": "Sums.", "parameters": {"type": "object"}, "strict": None}
SUB: Any = {"type": "function", "name": "sub", "parameters": None, "strict": None}
CALLS = (("call_a", "add", '{"a": 2, "b": 2}'), ("call_b", "sub", "{}"))
FULL = say("Let me add.", reasoning="hm, sums", calls=CALLS)


def read(given: Any = "hi", **fields: Any) -> ModelCall:
    return ResponsesDialect().read(orjson.dumps({"input": given, **fields}), nothing_recalled)


def said(call: ModelCall) -> Any:
    return orjson.loads(call.messages)


async def test_a_reply_of_every_kind_of_item_and_its_way_back() -> None:
    """What the client sends back becomes the one assistant message that it came from."""
    service = Service(replied(FULL))
    done = await service.openai.responses.create(
        model="policy", input="2+2?", instructions="Be brief.", tools=[ADD, SUB], metadata={"a": "b"}, temperature=0.5
    )
    assert done.id == "resp_r7-3"
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (done.output_text, done.status, done.instructions) == ("Let me add.", "completed", "Be brief.")
    assert (done.metadata, done.temperature, [tool.type for tool in done.tools]) == ({"a": "b"}, 0.5, ["function"] * 2)
    assert done.usage is not None
    assert (done.usage.input_tokens_details.cached_tokens, done.usage.output_tokens_details.reasoning_tokens) == (64, 7)
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert said(service.call) == start
    functions = [{"name": "add", "description": "Sums.", "parameters": {"type": "object"}}, {"name": "sub"}]
    assert orjson.loads(service.call.tools) == [{"type": "function", "function": f} for f in functions]

    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": "call_a", "output": "4"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "1"}]},
    ]
    back: Any = [{"role": "user", "content": "2+2?"}, *[item.model_dump() for item in done.output], *outputs]
    await service.openai.responses.create(model="policy", input=back, instructions="Be brief.")
    results = [
        {"role": "tool", "tool_call_id": "call_a", "content": "4"},
        {"role": "tool", "tool_call_id": "call_b", "content": "1"},
    ]
    assert said(service.call) == [*start, FULL.message, *results]

    service.recalled["resp_r7-3"] = [*start, dict(FULL.message)]
    await service.openai.responses.create(model="policy", input=outputs, previous_response_id="resp_r7-3")
    assert said(service.call) == [*start, FULL.message, *results]
    await service.openai.responses.create(
        model="policy", input=outputs, previous_response_id="resp_r7-3", instructions="Be loud."
    )
    assert said(service.call)[0] == {"role": "system", "content": "Be loud."}
    assert said(service.call)[1:] == [start[1], FULL.message, *results]
    with pytest.raises(openai.NotFoundError):
        await service.openai.responses.create(model="policy", input="x", previous_response_id="resp_other")


async def test_a_reply_cut_by_its_length() -> None:
    service = Service(replied(say("and so", finish_reason="length")))
    done = await service.openai.responses.create(model="policy", input="go", max_output_tokens=2)
    assert (done.status, done.output[0].type) == ("incomplete", "message")
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    async with service.openai.responses.stream(model="policy", input="go") as stream:
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.incomplete"


async def test_the_order_of_a_stream() -> None:
    service = Service(replied(FULL))
    stream = await service.openai.responses.create(model="policy", input="2+2?", tools=[ADD, SUB], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind not in kinds[at - 1 : at]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
        "completed",
    ]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == "Let me add."


async def test_the_stream_helper_builds_what_the_plain_call_gives() -> None:
    service = Service(replied(FULL))
    plain = await service.openai.responses.create(model="policy", input="2+2?", tools=[ADD, SUB])
    async with service.openai.responses.stream(model="policy", input="2+2?", tools=[ADD, SUB]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Let me add."
    assert [without_parsed(item.model_dump()) for item in final.output] == [
        without_parsed(item.model_dump()) for item in plain.output
    ]


async def test_logprobs_of_the_text() -> None:
    service = Service(replied(say("four and more")))
    asked: dict[str, Any] = {"model": "policy", "input": "2+2?", "include": ["message.output_text.logprobs"]}
    done = await service.openai.responses.create(**asked, top_logprobs=2)
    (item,) = done.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    assert [lp.token for lp in item.content[0].logprobs or ()] == ["fou", "r a", "nd ", "mor", "e"]
    stream = await service.openai.responses.create(**asked, stream=True)
    got = [lp.token async for e in stream if e.type == "response.output_text.delta" for lp in e.logprobs]
    assert got == ["fou", "r a", "nd ", "mor", "e"]


def without_parsed(value: Any) -> Any:
    """A dumped item without what the client's own parsing adds."""
    if isinstance(value, dict):
        return {k: without_parsed(v) for k, v in value.items() if k not in ("parsed", "parsed_arguments")}
    return [without_parsed(v) for v in value] if isinstance(value, list) else value


class Answer(BaseModel):
    """The sum."""

    value: int


async def test_a_parsed_reply() -> None:
    service = Service(replied(say('{"value": 4}')))
    done = await service.openai.responses.parse(model="policy", input="2+2?", text_format=Answer)
    assert done.output_parsed == Answer(value=4)
    assert (service.call.response_schema or {})["required"] == ["value"]


async def test_errors() -> None:
    service = Service(EngineError("gone"), late=True)
    with pytest.raises(openai.InternalServerError):
        await service.openai.responses.create(model="policy", input="a")
    stream = await service.openai.responses.create(model="policy", input="a", stream=True)
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass
    with pytest.raises(openai.BadRequestError, match="'web_search'"):
        await service.openai.responses.create(model="policy", input="a", tools=[{"type": "web_search"}])


@pytest.mark.parametrize(
    ("given", "fields", "said_why"),
    [
        ([], {}, "input is empty"),
        ([{"type": "item_reference", "id": "x"}], {}, r"input\[0\]: items are not kept"),
        ([{"type": "web_search_call"}], {}, r"input\[0\].type is 'web_search_call'"),
        ([{"role": "tool", "content": "x"}], {}, r"input\[0\].role is 'tool'"),
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            {},
            r"input\[0\].content\[0\].type is 'input_image'",
        ),
        ([{"role": "user"}], {}, r"input\[0\].content must be"),
        ([{"type": "function_call", "call_id": "a", "name": ""}], {}, r"input\[0\].name is empty"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}], {}, r"input\[0\].arguments"),
        ([{"type": "function_call_output", "output": "x"}], {}, r"input\[0\].call_id"),
        ("a", {"conversation": "c"}, "conversation"),
        ("a", {"background": True}, "background"),
        ("a", {"prompt": {"id": "x"}}, "prompt"),
        ("a", {"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ("a", {"text": {"format": {"type": "x"}}}, "text.format.type is 'x'"),
        ("a", {"reasoning": {"effort": "x"}}, "reasoning.effort is 'x'"),
        ("a", {"tool_choice": {"type": "web_search"}}, "tool_choice.type is 'web_search'"),
        (
            "a",
            {"tools": [{"type": "function", "name": "f", "parameters": {"x": {}}}], "max_output_tokens": 0},
            "max_out",
        ),
    ],
)
def test_what_is_refused_and_where(given: Any, fields: dict[str, Any], said_why: str) -> None:
    with pytest.raises(SessionError, match=said_why) as refused:
        read(given, **fields)
    assert refused.value.status == 400


def test_a_number_that_could_not_be_repeated_is_refused() -> None:
    body = b'{"input":"a","tools":[{"type":"function","name":"f","parameters":{"maximum":%s}}]}' % (b"9" * 30)
    with pytest.raises(SessionError, match="tools, tool_choice or text"):
        ResponsesDialect().read(body, nothing_recalled)


def test_which_items_make_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = {"type": "message", "role": "assistant", "content": "t"}
    think = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    sealed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    assert said(read([text, text])) == [{"role": "assistant", "content": "t"}] * 2
    assert said(read([text, call, think, call])) == [
        {"role": "assistant", "content": "t", "tool_calls": [made]},
        {"role": "assistant", "content": "", "reasoning_content": "s", "tool_calls": [made]},
    ]
    assert said(read([sealed, call, text])) == [{"role": "assistant", "content": "t", "tool_calls": [made]}]
    assert said(read([think, {"role": "user", "content": "u"}])) == [
        {"role": "assistant", "content": "", "reasoning_content": "s"},
        {"role": "user", "content": "u"},
    ]


async def test_langchain_on_this_api() -> None:
    service = Service(replied(FULL))
    model = ChatOpenAI(
        model="policy",
        api_key="key",
        base_url="http://test/v1",
        http_async_client=service.http,
        max_retries=0,
        use_responses_api=True,
        output_version="responses/v1",
    )
    bound = model.bind_tools([ADD, SUB])
    history: list[BaseMessage] = [HumanMessage("2+2?")]
    reply = await bound.ainvoke(history)
    assert isinstance(reply, AIMessage)
    assert [call["name"] for call in reply.tool_calls] == ["add", "sub"]
    history += [reply, ToolMessage("4", tool_call_id="call_a"), ToolMessage("1", tool_call_id="call_b")]
    service.reply = replied(say("Four."))
    assert (await bound.ainvoke(history)).text == "Four."
    echoed = said(service.call)[1]
    assert (echoed["content"], echoed["tool_calls"]) == ("Let me add.", FULL.message["tool_calls"])
    assert [m["content"] for m in said(service.call)[2:]] == ["4", "1"]
    parts = [chunk async for chunk in bound.astream("2+2?")]
    assert "".join(part.text for part in parts) == "Four."
