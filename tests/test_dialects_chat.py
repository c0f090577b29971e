"""Chat completions and completions on the wire, through the official `openai` client and LangChain."""

from __future__ import annotations

import math
from typing import Any

import openai
import orjson
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from palestra.server.gateway.dialects.chat import ChatDialect
from palestra.server.gateway.types import ModelCall, TokenLogprob
from palestra.server.types import EngineError, SessionError
from tests.dialects_app import Service, nothing_recalled, replied, say

USER: list[Any] = [{"role": "user", "content": "2+2?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SUB: Any = {"type": "function", "function": {"name": "sub"}}
CALLS = (("call_a", "add", '{"a": 2, "b": 2}'), ("call_b", "sub", '{"a": 1}'))


def read(**fields: Any) -> ModelCall:
    return ChatDialect().read(orjson.dumps({"messages": USER, **fields}), nothing_recalled)


def raw_chat(service: Service, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="policy", api_key="key", base_url="http://test/v1", http_async_client=service.http, max_retries=0, **more
    )


async def test_text_with_usage() -> None:
    service = Service(replied(say("It is four.", reasoning="two and two")))
    done = await service.openai.chat.completions.create(model="policy", messages=USER, max_completion_tokens=9, seed=3)
    assert (done.id, done.choices[0].message.content, done.choices[0].finish_reason) == (
        "chatcmpl-r7-3",
        "It is four.",
        "stop",
    )
    assert done.choices[0].message.model_extra == {"reasoning_content": "two and two"}
    assert done.choices[0].message.tool_calls is None
    assert done.usage is not None
    assert done.usage.total_tokens == 120
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == 64
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.reasoning_tokens == 7
    assert (service.call.max_tokens, service.call.sampling.seed) == (9, 3)
    assert orjson.loads(service.call.messages) == USER


async def test_parallel_tool_calls_and_null_content() -> None:
    service = Service(replied(say(calls=CALLS)))
    done = await service.openai.chat.completions.create(
        model="policy",
        messages=USER,
        tools=[ADD, SUB],
        tool_choice={"type": "function", "function": {"name": "add"}},
        parallel_tool_calls=False,
    )
    said = done.choices[0].message
    assert (said.content, done.choices[0].finish_reason) == (None, "tool_calls")
    assert [(c.id, c.function.name, c.function.arguments) for c in said.tool_calls or () if c.type == "function"] == [
        *CALLS
    ]
    assert (service.call.tool_choice, service.call.parallel_tool_calls) == ("=add", False)
    assert orjson.loads(service.call.tools) == [ADD, SUB]


async def test_logprobs_in_the_shape_of_the_api() -> None:
    odd = TokenLogprob("\ufffd", b"\xf0\x9f", -math.inf, (("\ufffd", math.nan),))
    service = Service(replied(say("four", tokens=(TokenLogprob("four", b"four", -0.25, (("for", -2.0),)), odd))))
    done = await service.openai.chat.completions.create(model="policy", messages=USER, logprobs=True, top_logprobs=1)
    shown = done.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    assert [t.model_dump() for t in shown.content] == [
        {
            "token": "four",
            "bytes": list(b"four"),
            "logprob": -0.25,
            "top_logprobs": [{"token": "for", "bytes": list(b"for"), "logprob": -2.0}],
        },
        {
            "token": "\ufffd",
            "bytes": [0xF0, 0x9F],
            "logprob": -9999.0,
            "top_logprobs": [{"token": "\ufffd", "bytes": list("\ufffd".encode()), "logprob": -9999.0}],
        },
    ]
    assert (service.call.logprobs, service.call.top_logprobs) == (True, 1)


async def test_a_stream_of_three_choices_with_logprobs_and_usage() -> None:
    texts = ["one two three", "uno  dos\n", ""]
    service = Service(replied(*(say(text) for text in texts)))
    stream = await service.openai.chat.completions.create(
        model="policy", messages=USER, n=3, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    heard, tokens, finished, usage = ["", "", ""], [0, 0, 0], {}, None
    first: list[int] = []
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            assert usage is None
            if choice.delta.role:
                first.append(choice.index)
            heard[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len((choice.logprobs.content or ()) if choice.logprobs else ())
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
    assert heard == texts
    assert first == [0, 1, 2]
    assert tokens == [5, 3, 0]
    assert finished == {0: "stop", 1: "stop", 2: "stop"}
    assert usage is not None
    assert usage.total_tokens == 120


async def test_the_stream_helper_builds_the_whole_reply() -> None:
    service = Service(replied(say("Let me add.", reasoning="hm, sums", calls=CALLS)))
    async with service.openai.chat.completions.stream(model="policy", messages=USER, tools=[ADD, SUB]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    said = final.choices[0].message
    assert said.content == "Let me add."
    assert (said.model_extra or {})["reasoning_content"] == "hm, sums"
    assert [(c.id, c.function.name, c.function.arguments) for c in said.tool_calls or ()] == [*CALLS]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_old_function_calls() -> None:
    service = Service(replied(say(calls=CALLS[:1])))
    history: Any = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "4"},
    ]
    asked: dict[str, Any] = {"model": "policy", "messages": history, "functions": [ADD["function"]]}
    done = await service.openai.chat.completions.create(**asked, function_call={"name": "add"})
    call = done.choices[0].message.function_call
    assert call is not None
    assert (call.name, call.arguments, done.choices[0].finish_reason) == ("add", CALLS[0][2], "function_call")
    assert orjson.loads(service.call.tools) == [ADD]
    assert service.call.tool_choice == "=add"
    made = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert orjson.loads(service.call.messages)[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    stream = await service.openai.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta.function_call async for chunk in stream]
    assert "".join(delta.arguments or "" for delta in deltas if delta) == CALLS[0][2]


async def test_errors_as_the_client_raises_them() -> None:
    service = Service(SessionError("no room", 400, "context_length_exceeded"))
    with pytest.raises(openai.BadRequestError) as bad:
        await service.openai.chat.completions.create(model="policy", messages=USER)
    assert (bad.value.code, bad.value.type, bad.value.param) == (
        "context_length_exceeded",
        "invalid_request_error",
        None,
    )
    with pytest.raises(openai.BadRequestError, match=r"\$\.temperature"):
        await service.openai.chat.completions.create(model="policy", messages=USER, temperature=-1)
    for status, kind in ((401, openai.AuthenticationError), (404, openai.NotFoundError), (409, openai.ConflictError)):
        service.reply = SessionError("no", status, "x")
        with pytest.raises(kind):
            await service.openai.chat.completions.create(model="policy", messages=USER)
    service.reply = EngineError("gone")
    with pytest.raises(openai.InternalServerError) as gone:
        await service.openai.chat.completions.create(model="policy", messages=USER)
    assert (gone.value.status_code, gone.value.code, gone.value.type) == (503, "engine_unavailable", "server_error")


async def test_an_error_after_the_stream_began() -> None:
    service = Service(EngineError("gone"), late=True)
    for name in ("chat", "completions"):
        asked: dict[str, Any] = {"model": "policy", "stream": True}
        if name == "chat":
            stream = await service.openai.chat.completions.create(**asked, messages=USER)
        else:
            stream = await service.openai.completions.create(**asked, prompt="a")
        with pytest.raises(openai.APIError, match="gone") as gone:
            async for _ in stream:
                pass
        assert gone.value.code == "engine_unavailable"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": {}}, "messages must be an array"),
        ({"tools": {}}, "tools must be an array"),
        ({"n": 0}, r"\$\.n"),
        ({"n": 129}, r"\$\.n"),
        ({"top_p": 0}, r"\$\.top_p"),
        ({"stop": [""]}, r"\$\.stop\[0\]"),
        ({"stop": ["a"] * 17}, r"\$\.stop"),
        ({"max_tokens": 0}, r"\$\.max_tokens"),
        ({"logit_bias": {"x": 1}}, r"\$\.logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, r"\$\.top_logprobs"),
        ({"seed": 2**63}, r"\$\.seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object"),
        ({"tool_choice": "required"}, "holds no tools"),
        ({"tool_choice": "any", "tools": [ADD]}, "tool_choice is 'any'"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": [ADD]}, "'mul', which is none"),
        ({"tool_choice": {"type": "custom"}, "tools": [ADD]}, "tool_choice.type is 'custom'"),
        ({"modalities": ["text", "audio"]}, "modalities holds 'audio'"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "huge"}, "reasoning_effort is 'huge'"),
        ({"functions": [{"name": "f"}], "tools": [ADD]}, "functions and tools"),
        ({"functions": [{}]}, r"functions\[0\].name"),
    ],
)
def test_what_is_refused_and_where(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SessionError, match=said) as refused:
        read(**fields)
    assert refused.value.status == 400


def test_what_the_fields_mean() -> None:
    call = read(
        stop="END",
        top_k=0,
        min_p=0.1,
        logit_bias={"007": 5},
        repetition_penalty=1.1,
        max_tokens=5,
        max_completion_tokens=6,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        tools=None,
        user="me",
        store=True,
        metadata={"a": "b"},
        forced_ids=[1, 2],
    )
    assert (call.stop, call.max_tokens, call.tools, call.forced_ids) == (("END",), 6, b"", (1, 2))
    assert call.response_schema == {"type": "object"}
    assert (call.sampling.top_k, call.sampling.min_p, call.sampling.repetition_penalty) == (-1, 0.1, 1.1)
    assert call.sampling.logit_bias == {"7": 5.0}
    assert call.sampling.temperature is None
    assert read(response_format={"type": "json_object"}).response_schema == {}
    assert read(response_format={"type": "text"}).response_schema is None
    assert (read(reasoning_effort="none").thinking, read(reasoning_effort="none").effort) == (False, None)
    assert (read(reasoning_effort="max").thinking, read(reasoning_effort="max").effort) == (None, "high")
    assert read(chat_template_kwargs={"enable_thinking": False}).thinking is False
    assert read(chat_template_kwargs={"thinking": True, "date": 3}).thinking is True


def test_allowed_tools_leave_the_others_out() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "sub"}}]}
    call = read(tools=[ADD, SUB], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (orjson.loads(call.tools), call.tool_choice) == ([SUB], "required")


async def test_completions_from_text_and_from_ids() -> None:
    service = Service(replied(say("four END of", stop_text="END")))
    done = await service.openai.completions.create(model="policy", prompt="2+2 is ", echo=True, stop="END")
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("2+2 is four ", "stop")
    assert (service.call.prompt, service.call.echo, service.call.messages) == ("2+2 is ", True, b"")
    await service.openai.completions.create(model="policy", prompt=[[5, 6]])
    assert service.call.prompt == (5, 6)
    for prompt, said in ((["a", "b"], "holds 2 prompts"), ([], "empty"), ([1, "a"], "mixes"), ("", "empty")):
        with pytest.raises(openai.BadRequestError, match=said):
            await service.openai.completions.create(model="policy", prompt=prompt)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="suffix"):
        await service.openai.completions.create(model="policy", prompt="a", suffix="b")


async def test_completions_stream_with_logprobs() -> None:
    service = Service(replied(say("one two three"), say("four", finish_reason="length")))
    whole = await service.openai.completions.create(model="policy", prompt="a", n=2, logprobs=1)
    stream = await service.openai.completions.create(model="policy", prompt="a", n=2, logprobs=1, stream=True)
    heard = ["", ""]
    tokens: list[list[Any]] = [[], []]
    reasons: dict[int, str] = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        heard[choice.index] += choice.text
        shown = choice.logprobs
        assert shown is not None
        tokens[choice.index] += zip(
            shown.tokens or (), shown.token_logprobs or (), shown.text_offset or (), strict=True
        )
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert heard == ["one two three", "four"]
    assert reasons == {0: "stop", 1: "length"}
    for choice, got in zip(whole.choices, tokens, strict=True):
        shown = choice.logprobs
        assert shown is not None
        assert got == [*zip(shown.tokens or (), shown.token_logprobs or (), shown.text_offset or (), strict=True)]


class Answer(BaseModel):
    """The sum."""

    value: int


async def test_langchain_calls_streams_and_structured_output() -> None:
    service = Service(replied(say("It is four.")))
    model = raw_chat(service)
    assert (await model.ainvoke("2+2?")).content == "It is four."
    parts = [chunk async for chunk in model.astream("2+2?")]
    assert "".join(str(part.content) for part in parts) == "It is four."
    service.reply = replied(say(calls=CALLS))
    said = await model.bind_tools([ADD, SUB]).ainvoke("2+2?")
    assert isinstance(said, AIMessage)
    assert [call["args"] for call in said.tool_calls] == [{"a": 2, "b": 2}, {"a": 1}]
    service.reply = replied(say('{"value": 4}'))
    assert await model.with_structured_output(Answer).ainvoke([HumanMessage("2+2?")]) == Answer(value=4)
    assert (service.call.response_schema or {})["properties"].keys() == {"value"}
    service.reply = replied(say(calls=(("call_a", "Answer", '{"value": 4}'),)))
    forced = model.with_structured_output(Answer, method="function_calling")
    assert await forced.ainvoke("2+2?") == Answer(value=4)
    assert service.call.tool_choice == "=Answer"
