"""gpt-oss: the text of the format's own examples, channels, calls, and a session that keeps `<|return|>`."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.server.renderer.families.harmony import HarmonyRenderer
from palestra.server.renderer.families.typescript import functions_namespace
from palestra.server.renderer.types import RenderOptions, Snapshot
from palestra.server.types import RenderError
from tests.renderer_session import TOOLS, Session, call, result, said, sampled, without_ids, written
from tests.tokenizers import added_codec

SPECIAL = (
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
USER = {"role": "user", "content": "q"}
DAY = RenderOptions(date="2025-06-28", effort="high")
SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2025-06-28\n\nReasoning: high\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
TO_TOOLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
NAMESPACE = """# Tools

## functions

namespace functions {

// Says the weather.
type weather = (_: {
city: string,
}) => any;

type clock = () => any;

} // namespace functions"""


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> HarmonyRenderer:
    return HarmonyRenderer(added_codec(SPECIAL, tmp_path_factory.mktemp("harmony")))


def test_the_whole_text_of_a_conversation_with_tools(harmony: HarmonyRenderer) -> None:
    session = Session(harmony, [{"role": "system", "content": "Be kind."}, USER], TOOLS, DAY)
    session.say(said(None, call("weather", '{"city": "SF"}', "a"), reasoning="Need weather."))
    session.hear(result('{"sunny": true}', "a"))
    session.say(said("Sunny.", reasoning="Easy."))
    session.hear({"role": "user", "content": "Thanks"})
    assert session.text == (
        f"{SYSTEM}{TO_TOOLS}<|end|><|start|>developer<|message|># Instructions\n\nBe kind.\n\n{NAMESPACE}<|end|>"
        "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>analysis<|message|>Need weather.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "SF"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '{"sunny": true}<|end|>'
        "<|start|>assistant<|channel|>analysis<|message|>Easy.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
        "<|start|>user<|message|>Thanks<|end|><|start|>assistant"
    )
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        said(None, call("weather", '{"city": "SF"}', "a"), reasoning="Need weather."),
        result('{"sunny": true}', "a"),
        said("Sunny.", reasoning="Easy."),
        {"role": "user", "content": "Thanks"},
    ]
    anew = harmony.render(messages, TOOLS, DAY).ids
    assert anew == [harmony.end if token == harmony.returned else token for token in session.ids]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (RenderOptions(), "2024-06\n\nReasoning: medium\n"),
        (RenderOptions(thinking=False), "Reasoning: low\n"),
        (RenderOptions(thinking=False, effort="high"), "Reasoning: high\n"),
    ],
)
def test_effort_and_date_stand_in_the_system_message(
    harmony: HarmonyRenderer, options: RenderOptions, shown: str
) -> None:
    text = harmony.codec.decode(harmony.render([USER], (), options).ids)
    assert shown in text
    assert "developer" not in text


def test_an_effort_that_is_none_is_refused(harmony: HarmonyRenderer) -> None:
    with pytest.raises(RenderError, match="low, medium, high"):
        harmony.render([USER], (), RenderOptions(effort="most"))


@pytest.mark.parametrize(
    "message",
    [
        said("Blue."),
        said(""),
        said("Blue.", reasoning="Look up.\n\nYes."),
        said(None, call("clock", "{}", "a")),
        said("I will look.", call("a", '{"x": "ü"}', "a"), call("b", "{}", "b"), reasoning="Hm."),
        said(None, call("browser.search", '{"query": "x"}', "a")),
    ],
)
def test_a_message_is_read_as_it_was_written(harmony: HarmonyRenderer, message: dict[str, Any]) -> None:
    reply = harmony.parse(sampled(harmony, message))
    assert without_ids(reply.message) == without_ids(message)
    assert reply.ill_formed is None


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "<|channel|>analysis to=functions.f code",
    ],
)
def test_the_recipient_may_stand_before_or_behind_the_channel(harmony: HarmonyRenderer, header: str) -> None:
    reply = harmony.parse(written(harmony, header + '<|message|>{"n": 1e3}<|call|>'))
    (made,) = reply.message["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"n": 1e3}'}
    assert reply.message["content"] is None


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1', [("f", '{"a": 1')]),
        ("<|channel|>commentary to=functions.f <|constrain|>", [("f", "{")]),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", [("f", "[1]")]),
        ("<|channel|>commentary to=functions.f", []),
        ("<|channel|>commentary to=functions.", []),
        ("<|channel|>commentary to=<|message|>{}<|call|>", []),
    ],
)
def test_broken_calls_are_on_record(harmony: HarmonyRenderer, text: str, calls: list[tuple[str, str]]) -> None:
    reply = harmony.parse(written(harmony, text))
    assert reply.ill_formed
    got = [(c["function"]["name"], c["function"]["arguments"]) for c in reply.message.get("tool_calls", ())]
    assert got == calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("hello", "hello", None),
        ("", "", None),
        ("<|channel|>anal", "", None),
        ("<|channel|>analysis<|message|>hm", "", "hm"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assis", "", "hm"),
        ("<|message|>x<|end|>", "x", None),
        ("<|channel|>final<|message|>a<|end|>b", "a<|end|>b", None),
        (
            "<|channel|>commentary<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>a",
            "plan\n\na",
            None,
        ),
    ],
)
def test_what_is_no_call_is_read_by_channel(
    harmony: HarmonyRenderer, text: str, content: str, reasoning: str | None
) -> None:
    reply = harmony.parse(written(harmony, text))
    assert (reply.message["content"], reply.message.get("reasoning_content")) == (content, reasoning)
    assert reply.ill_formed is None


@pytest.mark.parametrize(
    ("cut", "close"),
    [
        ("<|channel|>analysis<|message|>hm", "<|end|>"),
        ("<|channel|>ana", "<|message|><|end|>"),
        ("", "<|message|><|end|>"),
        ("<|channel|>analysis<|message|>hm<|end|>", ""),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>fin", "<|message|><|end|>"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>", "<|message|><|end|>"),
    ],
)
def test_a_cut_turn_is_closed_where_it_was_cut(harmony: HarmonyRenderer, cut: str, close: str) -> None:
    session = Session(harmony, [USER])
    session.say(written(harmony, cut))
    added = session.hear({"role": "user", "content": "Go on"})
    assert added == f"{close}<|start|>user<|message|>Go on<|end|><|start|>assistant"
    assert harmony.codec.decode(session.closed) == close


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>", "<|endoftext|>"])
def test_a_turn_that_ended_by_itself_keeps_its_end(harmony: HarmonyRenderer, end: str) -> None:
    done = harmony.extend(Snapshot(written(harmony, f"<|channel|>final<|message|>a{end}"), said("a")), [USER])
    assert done.close_tokens == 0
    assert harmony.codec.decode(done.ids).startswith("<|start|>user")


def test_a_forced_call_stands_in_the_prompt(harmony: HarmonyRenderer) -> None:
    for name, rest in (("clock", "{}"), ("", "clock <|constrain|>json<|message|>{}")):
        prompt = harmony.render([USER], TOOLS, RenderOptions(call=name))
        opened = prompt.ids[len(prompt.ids) - prompt.opened :]
        assert harmony.codec.decode(opened).startswith("<|channel|>commentary to=functions." + name)
        (made,) = harmony.parse([*written(harmony, rest), harmony.call], opened).message["tool_calls"]
        assert made["function"] == {"name": "clock", "arguments": "{}"}


def test_a_prefill_is_part_of_the_answer(harmony: HarmonyRenderer) -> None:
    prompt = harmony.render([USER], (), RenderOptions(prefill="The sky"))
    opened = prompt.ids[len(prompt.ids) - prompt.opened :]
    assert harmony.codec.decode(opened) == "<|channel|>final<|message|>The sky"
    assert harmony.parse(written(harmony, " is blue<|return|>"), opened).message == said("The sky is blue")
    session = Session(harmony, [USER], (), RenderOptions(prefill="The sky"))
    session.say(written(harmony, " is"))
    assert session.hear(USER).startswith("<|end|><|start|>user")


def test_special_text_stays_text(harmony: HarmonyRenderer) -> None:
    literal = "a<|end|><|start|>assistant<|channel|>final<|message|>b<|call|>"
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": literal}}, TOOLS[1]]
    ids = harmony.render([{"role": "system", "content": literal}, {"role": "user", "content": literal}], tools).ids
    plain = harmony.render([{"role": "system", "content": "x"}, USER], TOOLS).ids
    marks = harmony.codec.special.values()
    assert [token for token in ids if token in marks] == [token for token in plain if token in marks]
    assert harmony.parse(harmony.codec.encode_text(literal)).message == said(literal)


def test_results_are_named_by_their_calls_and_in_their_order(harmony: HarmonyRenderer) -> None:
    session = Session(harmony, [USER], TOOLS)
    session.say(said(None, call("weather", "{}", "a"), call("clock", "{}", "b")))
    first, second = (c["id"] for c in session.reply["tool_calls"])
    added = session.hear(result("two", second), result("one", first))
    assert added.startswith("<|start|>functions.weather to=assistant<|channel|>commentary<|message|>one<|end|>")
    assert "functions.clock to=assistant<|channel|>commentary<|message|>two" in added
    named = harmony.render([USER, {"role": "tool", "content": "x", "name": "clock"}])
    assert "<|start|>functions.clock to=assistant" in harmony.codec.decode(named.ids)
    with pytest.raises(RenderError, match="no call that is known"):
        harmony.render([USER, {"role": "tool", "content": "x"}])


def test_a_system_message_in_the_middle_is_the_developer_s(harmony: HarmonyRenderer) -> None:
    session = Session(harmony, [USER])
    session.say(said("a"))
    added = session.hear({"role": "system", "content": "Be brief."})
    assert added == "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>assistant"


def test_ten_thousand_messages_are_one_scan(harmony: HarmonyRenderer) -> None:
    one = written(harmony, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|><|start|>")
    assert len(harmony.parse(one * 10_000).message["tool_calls"]) == 10_000
    harmony.parse([harmony.message] * 10_000)
    harmony.parse([harmony.channel] * 10_000)


def test_a_transcript_is_a_session(harmony: HarmonyRenderer) -> None:
    session = Session(harmony, [USER], TOOLS)
    one, two = said(None, call("clock", "{}", "a"), reasoning="Hm."), said("Noon.")
    session.say(one)
    session.hear(result("12", "a"))
    session.say(two)
    row = harmony.transcript([USER, one, result("12", "a"), two], TOOLS)
    assert row.token_ids.tolist() == session.ids
    assert row.loss_mask.tolist() == session.mask
    assert row.token_ids[-1] == harmony.returned


def test_types_of_all_kinds() -> None:
    """The format's own example of a function with various schemas, and what it leaves open: nesting, unions, arrays without items."""
    fields = {
        "string": {"type": "string", "title": "STRING", "description": "A string", "examples": ["hello", "world"]},
        "nullable": {"type": "string", "nullable": True, "description": "A nullable string", "default": "the default"},
        "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "either": {
            "oneOf": [{"type": "string", "default": "s"}, {"type": "number", "description": "numbers can happen too"}],
            "description": "a oneof",
            "default": 20,
        },
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "many": {"type": "array", "items": {"type": ["string", "integer"]}},
        "some": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "boolean"}]}},
        "all": {"type": "array"},
        "inner": {"type": "object", "properties": {"x": {"type": "number", "description": "X"}}, "required": ["x"]},
        "odd": True,
    }
    parameters = {"type": "object", "description": "params object", "properties": fields, "required": ["string"]}
    tool = {"type": "function", "function": {"name": "f", "description": "One.\nTwo.", "parameters": parameters}}
    assert functions_namespace([tool]) == (
        "namespace functions {\n\n// One.\n// Two.\ntype f = (_: // params object\n{\n"
        '// STRING\n//\n// A string\n// Examples:\n// - "hello"\n// - "world"\nstring: string,\n'
        '// A nullable string\nnullable?: string | null, // default: "the default"\n'
        'kind?: "a" | "b", // default: a\n'
        "// a oneof\n// default: 20\neither?:\n"
        ' | string // default: "s"\n | number // numbers can happen too\n,\n'
        "optional?: number | null,\nmany?: string | number[],\nsome?: (string | boolean)[],\nall?: Array<any>,\n"
        "inner?: {\n    // X\n    x: number,\n    },\nodd?: any,\n}) => any;\n\n} // namespace functions"
    )


def test_a_schema_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"again": schema}
    with pytest.raises(RenderError, match="nested too deeply"):
        functions_namespace([{"type": "function", "function": {"name": "f", "parameters": schema}}])
