"""Llama-3: its template's text, calls as bare JSON, and a session that only grows."""

from __future__ import annotations

import json

import pytest

from palestra.server.renderer.families.llama import LlamaRenderer
from palestra.server.renderer.types import RenderOptions, Snapshot
from palestra.server.types import RenderError
from tests.renderer_session import CLOCK, TOOLS, WEATHER, Session, call, result, said, sampled, without_ids, written
from tests.tokenizers import added_codec

SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 03 Nov 2026\n\n"
ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
FORM = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
LISTED = "".join(json.dumps(tool, indent=4) + "\n\n" for tool in (WEATHER, CLOCK))
DAY = RenderOptions(date="2026-11-03")
USER = {"role": "user", "content": " q? "}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaRenderer:
    return LlamaRenderer(added_codec(SPECIAL, tmp_path_factory.mktemp("llama")))


def test_the_whole_text_of_a_conversation_with_tools(llama: LlamaRenderer) -> None:
    session = Session(llama, [{"role": "system", "content": "S\n"}, USER], TOOLS, DAY)
    session.say(said(None, call("weather", '{"city": "Zürich"}', "a")))
    session.hear(result('{"sky": "blue"}', "a"))
    session.say(said("Blue."))
    session.hear({"role": "user", "content": "Thanks"})
    assert session.text == (
        f"{SYSTEM}Environment: ipython\n{DATES}S<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
        f"best answers the given prompt.\n\n{FORM}{LISTED}q?<|eot_id|>"
        f'{ASSISTANT}{{"name": "weather", "parameters": {{"city": "Zürich"}}}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{\\"sky\\": \\"blue\\"}"<|eot_id|>'
        f"{ASSISTANT}Blue.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nThanks<|eot_id|>{ASSISTANT}"
    )
    assert session.ids.count(llama.begin) == 1
    messages = [
        {"role": "system", "content": "S"},
        USER,
        said(None, call("weather", '{"city": "Zürich"}', "a")),
        result('{"sky": "blue"}', "a"),
        said("Blue."),
        {"role": "user", "content": "Thanks"},
    ]
    assert llama.render(messages, TOOLS, DAY).ids == session.ids


def test_tools_in_the_system_turn(llama: LlamaRenderer) -> None:
    renderer = LlamaRenderer(llama.codec, tools_in_user=False)
    listed = (
        "You have access to the following functions. To call a function, please respond with JSON for a function call."
        f"{FORM}{LISTED}"
    )
    got = renderer.codec.decode(renderer.render([USER], TOOLS, DAY).ids)
    user = f"<|start_header_id|>user<|end_header_id|>\n\nq?<|eot_id|>{ASSISTANT}"
    assert got == f"{SYSTEM}Environment: ipython\n{DATES}{listed}<|eot_id|>{user}"
    first_is_no_user = llama.render([said("Hello")], TOOLS, DAY)
    assert listed in llama.codec.decode(first_is_no_user.ids)


@pytest.mark.parametrize(
    ("date", "shown"), [("", "26 Jul 2024"), ("2024-07-26", "26 Jul 2024"), ("2025-03-01", "01 Mar 2025")]
)
def test_the_date_is_the_session_s(llama: LlamaRenderer, date: str, shown: str) -> None:
    ids = llama.render([USER], (), RenderOptions(date=date)).ids
    assert f"Today Date: {shown}\n\n<|eot_id|>" in llama.codec.decode(ids)


def test_a_date_that_is_none_is_refused(llama: LlamaRenderer) -> None:
    with pytest.raises(RenderError, match="ISO date"):
        llama.render([USER], (), RenderOptions(date="today"))


@pytest.mark.parametrize(
    "message",
    [
        said("Blue."),
        said(""),
        said('{"name": "Ada", "age": 36}'),
        said("[1, 2]"),
        said(None, call("clock", "{}", "a")),
        said(None, call("a", '{"x": "ü\\n}"}', "a"), call("b", "{}", "b"), call("c", '{"y": [1]}', "c")),
        said("Let me look.\n", call("clock", "{}", "a")),
    ],
)
def test_a_message_is_read_as_it_was_written(llama: LlamaRenderer, message: dict[str, object]) -> None:
    reply = llama.parse(sampled(llama, message))
    assert without_ids(reply.message) == without_ids(message)
    assert reply.ill_formed is None


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}\n',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
    ],
)
def test_other_spellings_of_a_call(llama: LlamaRenderer, text: str) -> None:
    calls = llama.parse([*written(llama, text), llama.stop_ids[1]]).message["tool_calls"]
    assert {(c["function"]["name"], c["function"]["arguments"]) for c in calls} == {("f", '{"a": 1}')}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"a": 1', [("f", '{"a": 1')]),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {"b"', [("f", "{}"), ("g", '{"b"')]),
        ('<|python_tag|>{"name": "f", ', [("f", "{")]),
        ('{"name": "f', None),
        ('{"name": "f", "parameters": {}} and more', None),
        ("<|python_tag|>print(1)", None),
        ("<|python_tag|>", None),
    ],
)
def test_broken_calls_are_on_record(llama: LlamaRenderer, text: str, calls: list[tuple[str, str]] | None) -> None:
    reply = llama.parse(written(llama, text))
    assert reply.ill_formed
    got = [(c["function"]["name"], c["function"]["arguments"]) for c in reply.message.get("tool_calls", ())]
    assert got == (calls or [])
    if calls is None:
        assert reply.message["content"] == text


def test_a_forced_call_stands_in_the_prompt(llama: LlamaRenderer) -> None:
    for name, rest in (("clock", "{}}"), ("", 'clock", "parameters": {}}')):
        prompt = llama.render([USER], TOOLS, RenderOptions(call=name))
        opened = prompt.ids[len(prompt.ids) - prompt.opened :]
        assert opened
        (made,) = llama.parse([*llama.codec.encode_text(rest), llama.end], opened).message["tool_calls"]
        assert made["function"] == {"name": "clock", "arguments": "{}"}


def test_a_prefill_is_part_of_the_reply(llama: LlamaRenderer) -> None:
    prompt = llama.render([USER], (), RenderOptions(prefill="The sky"))
    opened = prompt.ids[len(prompt.ids) - prompt.opened :]
    assert llama.codec.decode(opened) == "The sky"
    assert llama.parse(llama.codec.encode_text(" is blue"), opened).message["content"] == "The sky is blue"


def test_special_text_stays_text(llama: LlamaRenderer) -> None:
    literal = "a<|eot_id|><|begin_of_text|><|python_tag|>b"
    user = {"role": "user", "content": literal}
    plain = llama.render([{"role": "user", "content": "x"}], TOOLS).ids
    tool = {**WEATHER, "function": {**WEATHER["function"], "description": "Says <|eot_id|>."}}
    ids = llama.render([user], [tool, CLOCK]).ids
    marked = [token for token in ids if token in llama.codec.special.values()]
    assert marked == [token for token in plain if token in llama.codec.special.values()]
    assert llama.parse(llama.codec.encode_text(literal)).message == {"role": "assistant", "content": literal}


def test_a_cut_turn_is_closed(llama: LlamaRenderer) -> None:
    session = Session(llama, [USER])
    session.say(llama.codec.encode_text("The sk"))
    assert session.hear({"role": "system", "content": "Go on."}).startswith("<|eot_id|><|start_header_id|>system")
    assert session.closed == [llama.end]
    done = llama.extend(Snapshot([1, llama.stop_ids[1]], said("x")), [USER])
    assert done.close_tokens == 0


def test_results_come_in_the_order_of_their_calls(llama: LlamaRenderer) -> None:
    session = Session(llama, [USER], TOOLS)
    session.say(said(None, call("clock", "{}", "a"), call("clock", "{}", "b")))
    first, second = (c["id"] for c in session.reply["tool_calls"])
    added = session.hear(result("two", second), result("one", first))
    assert added.index('"one"') < added.index('"two"')


def test_ten_thousand_calls_are_one_scan(llama: LlamaRenderer) -> None:
    ids = llama.codec.encode_text('{"name": "f", "parameters": {}}\n') * 10_000
    assert len(llama.parse(ids).message["tool_calls"]) == 10_000
    assert not llama.parse([llama.python_tag] * 10_000).has_calls
    assert not llama.parse(llama.codec.encode_text('{"name": "f", "parameters": ' + "[" * 10_000)).message["content"]


def test_a_transcript_is_a_session(llama: LlamaRenderer) -> None:
    session = Session(llama, [USER], TOOLS)
    one, two = said(None, call("clock", "{}", "a")), said("Noon.")
    session.say(one)
    session.hear(result("12", "a"))
    session.say(two)
    row = llama.transcript([USER, one, result("12", "a"), two], TOOLS)
    assert row.token_ids.tolist() == session.ids
    assert row.loss_mask.tolist() == session.mask
