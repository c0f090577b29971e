"""The renderer: what every family of marked turns keeps to, whatever its markup."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palestra.server.gateway.dialects.reading import check_messages
from palestra.server.renderer.base import FamilyRenderer
from palestra.server.renderer.text import arguments_text, call_of, literal
from palestra.server.renderer.tokens import BREAK, TokenCodec
from palestra.server.renderer.types import ExtendRefused, RenderOptions, Snapshot
from palestra.server.types import RenderError
from tests.renderer_cases import (
    ANSWERED,
    ASKED,
    CALLED,
    CONVERSATION,
    FAMILIES,
    RESULTS,
    THANKED,
    THINKING,
    TOOLS,
    call,
    for_family,
    plain,
    play,
    sampled,
    tiny,
)

Get = Callable[[str], FamilyRenderer]
ONE_SYSTEM = ("qwen3.5", "minimax")
"""Families that know a system message only at the beginning."""


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """A family's renderer on a tiny tokenizer, made once."""
    made: dict[str, FamilyRenderer] = {}

    def of(name: str) -> FamilyRenderer:
        if name not in made:
            made[name] = tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def renderer(name: str, get: Get) -> FamilyRenderer:
    return get(name)


def text(renderer: FamilyRenderer, ids: Any) -> str:
    return renderer.codec.decode(list(ids))


def broken_call(renderer: FamilyRenderer) -> list[int]:
    """A call that is cut in the middle of its arguments, as ids of its own pieces."""
    message = {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Zürich", days=2)]}
    ids = sampled(renderer, message)
    cut = next(at for at in range(len(ids)) if "rich" in text(renderer, ids[:at]))
    return ids[:cut]


# Prompts and extensions.


def test_each_prompt_begins_with_all_that_was_before(name: str, renderer: FamilyRenderer) -> None:
    messages = for_family(name, [*ASKED, ANSWERED, THANKED, CALLED, *RESULTS, ANSWERED, THANKED])
    played = play(renderer, messages)
    for prompt, completion, following in zip(played.prompts, played.completions, played.prompts[1:], strict=False):
        assert following[: len(prompt) + len(completion)] == prompt + completion
    assert len(played.prompts) == 4


def test_an_extension_says_what_rendering_the_whole_would_say(name: str, renderer: FamilyRenderer) -> None:
    messages = for_family(name, CONVERSATION)
    assert play(renderer, messages).ids == list(renderer.render(messages, TOOLS).ids)


def test_a_reply_is_read_as_the_message_that_it_was_written_from(name: str, renderer: FamilyRenderer) -> None:
    messages = for_family(name, CONVERSATION)
    said = [plain(m) for m in messages if m["role"] == "assistant"]
    assert [plain(reply) for reply in play(renderer, messages).replies] == said


def test_special_text_in_content_is_spelled_out(renderer: FamilyRenderer) -> None:
    literally = "a" + "b".join(renderer.codec.special) + "c"
    plainly = renderer.render([{"role": "user", "content": "x"}])
    ids = renderer.render([{"role": "user", "content": literally}]).ids
    special = set(renderer.codec.special.values())
    assert [i for i in ids if i in special] == [i for i in plainly.ids if i in special]
    assert literally in text(renderer, ids)


def test_a_cut_turn_is_closed_and_said_to_be(name: str, renderer: FamilyRenderer) -> None:
    completion = renderer.codec.encode_text("so far")
    opened = renderer.codec.encode([])
    extension = renderer.extend(Snapshot(completion, {"role": "assistant", "content": "so far"}, opened), [THANKED])
    ended = renderer.extend(Snapshot([*completion, renderer.end], {}, opened), [THANKED])
    if name == "glm":  # the next header is what ends a turn
        assert extension.close_tokens == 0
        assert extension.ids[0] == renderer.end
        assert list(ended.ids) == list(extension.ids[1:])
    else:
        assert extension.close_tokens == 1
        assert extension.ids[0] == renderer.end
        assert list(ended.ids) == list(extension.ids[1:])
    assert ended.close_tokens == 0


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_that_was_cut_is_ended_before_the_turn_is(name: str, get: Get) -> None:
    renderer = get(name)
    assert renderer.think is not None
    opened = renderer.codec.encode(renderer.opened(RenderOptions()))
    thought = renderer.codec.encode_text("\nhm")
    completion = thought if opened else [renderer.think, *thought]
    reply = renderer.parse(completion, opened)
    assert plain(reply.message) == {"reasoning": "hm"}
    assert reply.message["content"] == ""
    extension = renderer.extend(Snapshot(completion, reply.message, opened), [THANKED])
    assert extension.ids[0] == renderer.think_end
    assert extension.ids[1] == renderer.end
    assert extension.close_tokens == (1 if name == "glm" else 2)


@pytest.mark.parametrize("name", THINKING)
def test_without_thinking_the_prompt_holds_an_empty_block_that_stays(name: str, get: Get) -> None:
    renderer, silent = get(name), RenderOptions(thinking=False)
    first = renderer.render(ASKED, TOOLS, silent)
    opened = list(first.ids[len(first.ids) - first.opened :])
    assert opened.count(renderer.think or -1) == opened.count(renderer.think_end or -1) == 1
    completion = [*renderer.codec.encode_text("Rain."), *renderer.codec.encode(renderer.turn_end({}))]
    reply = renderer.parse(completion, opened)
    assert plain(reply.message) == {"content": "Rain."}
    second = renderer.extend(Snapshot(completion, reply.message, opened), [THANKED], silent)
    assert list(second.ids[len(second.ids) - second.opened :]) == opened
    assert second.opened == first.opened


def test_a_reasoning_end_without_a_beginning_ends_reasoning(get: Get) -> None:
    renderer = get("qwen3")
    ids = [*renderer.codec.encode_text("hm\n"), renderer.think_end or -1, *renderer.codec.encode_text("\n\nyes")]
    assert renderer.parse(ids).message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_a_system_message_in_the_middle(name: str, renderer: FamilyRenderer) -> None:
    (_, answered) = for_family(name, [ASKED[0], ANSWERED])
    last = Snapshot(sampled(renderer, answered), answered)
    new = [{"role": "system", "content": "Be long."}, THANKED]
    if name in ONE_SYSTEM:
        with pytest.raises(ExtendRefused, match="first message") as refused:
            renderer.extend(last, new)
        assert refused.value.reason == "system_after_reply"
    else:
        assert "Be long." in text(renderer, renderer.extend(last, new).ids)
        assert list(renderer.extend(last, [{**new[0], "role": "developer"}, THANKED]).ids) == list(
            renderer.extend(last, new).ids
        )


def test_an_assistant_message_among_the_new_ones_is_context(name: str, renderer: FamilyRenderer) -> None:
    messages = for_family(name, [*ASKED, ANSWERED, THANKED, ANSWERED, THANKED])
    last = Snapshot(sampled(renderer, messages[2]), messages[2])
    opened = [*renderer.render(messages[:2]).ids, *last.completion]
    together = [*opened, *renderer.extend(last, messages[3:]).ids]
    assert text(renderer, together) == text(renderer, renderer.render(messages).ids)


def test_a_transcript_is_what_playing_would_give(name: str, renderer: FamilyRenderer) -> None:
    messages = for_family(name, [*ASKED, ANSWERED, THANKED, CALLED, *RESULTS, ANSWERED])
    played = play(renderer, [*messages, THANKED])
    row = renderer.transcript(messages, TOOLS)
    length = len(played.prompts[2]) + len(played.completions[2])
    assert row.token_ids.tolist() == played.ids[:length]
    mask = [0] * length
    for prompt, completion in zip(played.prompts, played.completions, strict=False):
        mask[len(prompt) : len(prompt) + len(completion)] = [1] * len(completion)
    assert row.loss_mask.tolist() == mask
    with pytest.raises(RenderError, match="assistant message"):
        renderer.transcript(ASKED)


# Calls.


def test_a_forced_call_begins_in_the_prompt(name: str, renderer: FamilyRenderer) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Zürich", days=2)]}
    prompt = renderer.render(ASKED, TOOLS, RenderOptions(call="weather"))
    opened = list(prompt.ids[len(prompt.ids) - prompt.opened :])
    whole = text(renderer, sampled(renderer, message))
    rest = whole[whole.index("weather") :].split("weather", 1)[1]
    begun = text(renderer, opened).split("weather", 1)[1]
    assert rest.startswith(begun)
    completion = renderer.codec.encode(renderer.codec.wording(rest[len(begun) :]))
    reply = renderer.parse(completion, opened)
    assert reply.ill_formed is None
    assert plain(reply.message) == plain(message)
    anyhow = renderer.render(ASKED, TOOLS, RenderOptions(call=""))
    assert text(renderer, opened).startswith(text(renderer, anyhow.ids[len(anyhow.ids) - anyhow.opened :]))


def test_a_prefill_is_part_of_the_reply(name: str, renderer: FamilyRenderer) -> None:
    prompt = renderer.render(ASKED, (), RenderOptions(prefill="It is"))
    opened = list(prompt.ids[len(prompt.ids) - prompt.opened :])
    assert text(renderer, prompt.ids).endswith("It is")
    completion = [*renderer.codec.encode_text(" rain."), *renderer.codec.encode(renderer.turn_end({}))]
    assert plain(renderer.parse(completion, opened).message) == {"content": "It is rain."}


def test_a_cut_call_keeps_its_name_and_its_raw_arguments(name: str, renderer: FamilyRenderer) -> None:
    reply = renderer.parse(broken_call(renderer), renderer.codec.encode(renderer.opened(RenderOptions())))
    (found,) = reply.message["tool_calls"]
    assert reply.ill_formed is not None
    assert found["function"]["name"] == "weather"
    assert "Zürich" in found["function"]["arguments"]
    with pytest.raises(ValueError):
        json.loads(found["function"]["arguments"])
    again = renderer.render([*ASKED, {**reply.message}, {**RESULTS[0], "tool_call_id": found["id"]}])
    assert found["function"]["arguments"] in text(renderer, again.ids)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "chatml"])  # whose calls have no marks
def test_text_that_spells_marks_is_text(name: str, get: Get) -> None:
    renderer = get(name)
    message = {"role": "assistant", "content": None, "tool_calls": [call("weather", city="x")]}
    opened = renderer.codec.encode([*renderer.opened(RenderOptions(thinking=False))])
    spelled = text(renderer, sampled(renderer, message)[:-1]).strip("\n")
    reply = renderer.parse(renderer.codec.encode_text(spelled), opened)
    assert reply.message == {"role": "assistant", "content": spelled}
    assert reply.ill_formed is None


def test_whatever_is_sampled_is_read_and_said_again(name: str, renderer: FamilyRenderer) -> None:
    """Marks in any order, cut anywhere: nothing raises, the prompt goes on from it, and the message can be rendered."""
    draw = random.Random(name)
    message = for_family(name, [CALLED])[0]
    marks = [*renderer.codec.special.values(), *sampled(renderer, message)]
    opened = renderer.codec.encode(renderer.opened(RenderOptions()))
    for _ in range(100):
        ids = [draw.choice(marks) for _ in range(draw.randrange(30))]
        reply = renderer.parse(ids, opened)
        calls = reply.message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in calls]
        extension = renderer.extend(Snapshot(ids, reply.message, opened), [*results, THANKED])
        assert extension.ids[: extension.close_tokens] == renderer.codec.encode(
            renderer.close(Snapshot(ids, reply.message, opened))
        )
        check_messages([reply.message, *results])
        assert renderer.render([*ASKED, reply.message, *results]).ids
        assert renderer.transcript([*ASKED, reply.message]).loss_mask.any()


@pytest.mark.parametrize("called", ["", " ", "\n"])
def test_a_call_without_a_name_is_none(name: str, renderer: FamilyRenderer, called: str) -> None:
    """A caller has to be able to send the reply back, and a call without a name is refused."""
    message = for_family(name, [{"role": "assistant", "content": None, "tool_calls": [call(called, city="x")]}])[0]
    ids = sampled(renderer, message)
    opened = renderer.codec.encode(renderer.opened(RenderOptions()))
    for cut in range(len(ids) // 2, len(ids) + 1):
        check_messages([renderer.parse(ids[:cut], opened).message])


@pytest.mark.parametrize("spread", ["empty", "open", "calls"])
def test_ten_thousand_blocks_are_one_scan(name: str, renderer: FamilyRenderer, spread: str) -> None:
    """What costs time by the square of its length does not end here."""
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", a=1)]}
    ids = [token for token in sampled(renderer, message) if token not in renderer.stop_ids]
    if spread == "empty":
        ids = [token for token in ids if token in renderer.codec.special.values()]
    if spread == "open":
        ids = ids[: len(ids) // 2]
    count = 2_000 if spread == "calls" else 10_000
    ids *= count
    reply = renderer.parse(ids, renderer.codec.encode(renderer.opened(RenderOptions())))
    assert len(reply.message.get("tool_calls") or ()) == count or spread != "calls"


@pytest.mark.parametrize("role", ["function", "critic"])
def test_what_no_family_can_say_is_refused(renderer: FamilyRenderer, role: str) -> None:
    with pytest.raises(RenderError, match=role):
        renderer.render([{"role": role, "content": "x"}])
    with pytest.raises(RenderError, match="image_url"):
        renderer.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(RenderError, match="no token"):
        renderer.codec.special_id("<none>")


# Below the families.


def test_a_codec_knows_its_own_wording_and_nobody_else_s(get: Get) -> None:
    codec = get("qwen3").codec
    call, end = codec.special_id("<tool_call>"), codec.special_id("<|im_end|>")
    assert codec.wording("a<tool_call>b<|im_end|>") == ["a", call, "b", end]
    assert codec.wording("<tool_call>") == [call]
    assert codec.wording("") == []
    assert codec.encode(["a", BREAK, "b", call]) == [*codec.encode_text("a"), *codec.encode_text("b"), call]
    assert codec.token_text(call) == "<tool_call>"


def test_text_that_utf_8_cannot_carry_is_rendered(get: Get) -> None:
    codec = get("qwen3").codec
    assert codec.decode(codec.encode_text("a\ud83d\ude00b\ud800c")) == "a😀b\ufffdc"
    made, wrong = call_of('{"name": "f", "arguments": {"x": "\\ud800"}}')
    assert made is not None
    assert wrong is None
    assert made["function"]["arguments"] == '{"x": "\\ud800"}'


def test_arguments_of_any_kind_are_spelled() -> None:
    def spelled(arguments: Any) -> str:
        return arguments_text({"function": {"name": "f", "arguments": arguments}})

    assert spelled({"a": "ü"}) == spelled('{"a":"\\u00fc"}') == '{"a": "ü"}'
    assert spelled(None) == spelled("") == "{}"
    assert spelled('{"a": 1') == '{"a": 1'
    deep = "[" * 100_000
    assert spelled(deep) == deep


@pytest.mark.parametrize(
    ("said", "value"),
    [
        *(("12", 12), ("-1.5", -1.5), ("true", True), ("null", None), ('{"a": [1]}', {"a": [1]}), ("[]", [])),
        *(("a", "a"), ('"a"', '"a"'), ("", ""), (" a ", " a "), ("NaN", "NaN"), ("007", "007"), ("1+2", "1+2")),
        *(("{a}", "{a}"), ("nullify", "nullify"), ("[" * 100_000, "[" * 100_000), ("9" * 5000, "9" * 5000)),
    ],
)
def test_a_value_without_quotes_is_json_where_it_can_be_nothing_else(said: str, value: Any) -> None:
    assert literal(said) == value
    assert type(literal(said)) is type(value)


def test_missing_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"tokenizer\.json"):
        TokenCodec(tmp_path)
